#!/bin/bash
# tmp/gpu.sh [chain] [trees] [costs]   (default: chain costs; about 90 s each part at most, less is likely)
# Files are kept in $DIR between calls. Needs about 9 GB of disk.
set -u
PY=${PY:-python3}
export PYTHONPATH=$PWD
DIR=${DIR:-/tmp/chooser}
PARTS=${*:-chain costs}
mkdir -p "$DIR"
begin=$(date +%s)
$PY - "$DIR" $PARTS <<'EOF'
import sys, pathlib
from scripts.synthetic.__main__ import main
d, parts = pathlib.Path(sys.argv[1]), sys.argv[2:]
base = ["--preset", "llama3.1-8b", "--quant", "gptq", "--draft-quant", "gptq", "--out", str(d / "target")]
if not (d / "target").is_dir():
    main([*base, "--acceptance", "0.8", "--draft-out", str(d / "c0.8")])
wanted = []
if "chain" in parts:
    wanted += [(p, 0.0, f"c{p}") for p in (0.0, 0.3, 0.5, 0.9)]
if "trees" in parts:
    wanted += [(p, 0.5, f"t{p}") for p in (0.3, 0.5, 0.8, 0.9)]
for p, second, name in wanted:
    if not (d / name).is_dir():
        main([*base, "--acceptance", str(p), "--second", str(second), "--draft-only", "--draft-out", str(d / name)])
if "costs" in parts and not (d / "mtp3").is_dir():
    main(["--preset", "llama3.1-8b-mtp3", "--quant", "gptq", "--out", str(d / "mtp3")])
EOF
echo "files: $(( $(date +%s) - begin )) s"
for part in $PARTS; do
  case $part in
    chain)
      timeout 80 $PY scripts/bench/bench_chooser.py --model "$DIR/target" \
        --drafts "$DIR/c0.3,$DIR/c0.5,$DIR/c0.8,$DIR/c0.9" --shapes 0/1,1/2,2/3,4/5
      timeout 20 $PY scripts/bench/bench_chooser.py --model "$DIR/target" --drafts "$DIR/c0.0" \
        --shapes 0/1 --first 200 --tokens 600 ;;
    trees)
      timeout 90 $PY scripts/bench/bench_chooser.py --model "$DIR/target" \
        --drafts "$DIR/t0.3,$DIR/t0.5,$DIR/t0.8,$DIR/t0.9" --shapes 0/1,1/2,2/8,4/5,4/16 ;;
    costs)
      timeout 90 $PY scripts/bench/bench_drafts.py --model "$DIR/target" --draft "$DIR/c0.8" \
        --modules "$DIR/mtp3" ;;
  esac
  echo "after $part: $(( $(date +%s) - begin )) s"
done
