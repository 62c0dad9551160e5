#!/usr/bin/env bash
# Train and measure the reference drafters of SmolLM2-135M-Instruct, once: they stay in the user's cache, in folders
# named by what shapes them (code, confs and corpus), and a run that was stopped goes on.
#   bash scripts/reference.sh        ten minutes of training each
#   bash scripts/reference.sh long   twenty minutes each, where the CPU has bf16 instructions
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-short} in
    short) confs="eagle31_smol medusa_smol" ;;
    long) confs="eagle31_smol_long medusa_smol_long" ;;
    *) echo "error: the tiers are short and long, not $1" >&2; exit 1 ;;
esac
bash scripts/setup.sh
python=.venv/bin/python
shaping="models/*.py train/*.py conf/*smol*.yaml conf/target/smol.yaml conf/data/smol.yaml conf/drafter/*.yaml train/corpus/smol.jsonl.gz"
digest=$(cat $shaping constraints.txt | sha256sum | cut -c1-12)
home=${OUTRIDER_CACHE:-$HOME/.cache/outrider}/drafters
for conf in $confs; do
    [ -e "$home/$conf-$digest/drafter.yaml" ] || $python -m train "conf=$conf" "out=$home/$conf-$digest"
done
set -- $confs
first="$home/$1-$digest"
for tree in auto chain; do
    [ -e "$first/$tree/report.json" ] || $python decode/run.py "conf=$1" "trained=$first" "decode.beside=[$home/$2-$digest]" \
        "decode.tree=$tree" "decode.out=$first/$tree"
done
echo "the drafters are in $home: $1-$digest, $2-$digest (measured in $first/auto and chain)"
