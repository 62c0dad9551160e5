#!/usr/bin/env bash
# How much is enough: the drafter GENERAL is adapted as CONF says with 50 to 1,400 of its prompts, the same number of steps
# each, and all are measured beside GENERAL on BENCH, prompt by prompt, in one table.
#   bash scripts/curve.sh eagle3_medical eagle3_smol medical
#   bash scripts/curve.sh medusa_sql medusa_smol sql "100 400" peft=lora
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 3 ] || { echo "usage: bash scripts/curve.sh CONF GENERAL BENCH [COUNTS] [setting=value ...]" >&2; exit 1; }
conf=$1 general=$2 bench=$3 counts=${4:-50 140 350 700 1400}
shift $(($# < 4 ? $# : 4))
bash scripts/setup.sh
python=.venv/bin/python
for count in $counts; do
    out=outputs/$conf/$count
    [ -e "$out/drafter.yaml" ] || $python -m train "conf=$conf" "data.conversations=$count" "out=$out" "$@"
    beside=${beside:+$beside,}$out
done
$python decode/run.py "conf=$general" "decode.bench=[$bench]" decode.prompts=30 "decode.beside=[$beside]"
