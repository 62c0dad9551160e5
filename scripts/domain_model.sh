#!/usr/bin/env bash
# A domain model, end to end: a bank's way to answer becomes SmolLM2's by LoRA, and a drafter follows it.
# A system message shows the way; the answers, without it, teach the adapter (context distillation).
# COUNT=16 TOKENS=24 STEPS=8 bash scripts/domain_model.sh outputs/try  is a small try.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=.venv/bin/python
home=${1:-outputs/bank}
count=${COUNT:-400} tokens=${TOKENS:-64} steps=${STEPS:-200}
held=$((count / 8))
mkdir -p "$home"

$python - "$home/asked.jsonl" "$count" <<'PYTHON'
import sys
from pathlib import Path
from conf import packaged
from decode.prompts import evenly
from train.data import write_rows
from train.sources import conversations_of
way = "You are Ada of the Blue Bank. Answer in two short sentences, begin with 'Thank you for asking Ada.', and never give links."
rows = evenly(list(conversations_of("pkg://train/domain/banking.jsonl.gz")), int(sys.argv[2]))
write_rows(Path(sys.argv[1]), [{**row, "messages": [{"role": "system", "content": way}, *row["messages"]]} for row in rows])
PYTHON
$python scripts/regenerate.py conf=lora_smol regenerate.prompts="$home/asked.jsonl" regenerate.out="$home/shown.jsonl" regenerate.tokens="$tokens"
$python - "$home" <<'PYTHON'
import sys
from pathlib import Path
from train.data import write_rows
from train.sources import conversations_of
home = Path(sys.argv[1])
write_rows(home / "taught.jsonl", [{**row, "messages": row["messages"][1:]} for row in conversations_of(home / "shown.jsonl")])
PYTHON

warmup=$((steps / 10 + 1))
$python -m train conf=lora_smol data.path="$home/taught.jsonl" data.heldout="$held" optim.steps="$steps" optim.warmup="$warmup" out="$home/model"
ours=(target.adapter="$home/model/target" data=banking data.conversations="$((count - held))" data.heldout="$held" regenerate.tokens="$tokens")
from=(conf=medusa_smol init_from=medusa_smol optim.lr=5.0e-4 optim.steps="$steps" optim.warmup="$warmup" log.prompts=0)
$python -m train "${from[@]}" "${ours[@]}" optim.steps=0 out="$home/general"   # the shipped drafter, on the new model
$python -m train "${from[@]}" "${ours[@]}" out="$home/drafter"
$python decode/run.py conf=medusa_smol "${ours[@]}" trained="$home/drafter" "decode.beside=[$home/general]" 'decode.bench=[banking,gsm8k]' out="$home"
