#!/usr/bin/env bash
# What only a GPU can tell: its tests, then the tables of bench/results, one after the other.
#
#   bash bench/gpu.sh FOLDER [NAME ...]      NAME: tests random attention seeing decode lens hf train generate
#
# Each has a time limit, so that none takes the time of those behind it, and leaves in FOLDER what it
# had printed, NAME.log, and its table, NAME.md, with the rows that it came to. `random` draws 10,000
# calls at random, of which `tests` has 40. WORKERS: processes of the tests (8). OPTIONS: given to
# each table's program as well, such as --tiny to try this on a CPU (generate.py has no such option).
set -uo pipefail
folder="$(mkdir -p "$1" && cd "$1" && pwd)" && shift || exit 2
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
(($#)) || set -- tests random attention seeing decode lens hf train generate

table() { # SECONDS NAME PROGRAM [OPTION ...]
  local limit="$1" name="$2" program="$3"
  # shellcheck disable=SC2086
  timeout "$limit" python3 "bench/$program" "${@:4}" ${OPTIONS:-} --out "$folder/$name.md" >"$folder/$name.log" 2>&1
}

tests() { # SECONDS NAME [OPTION ...]
  # Interrupted, and no worker of it beside, pytest still shows what failed.
  timeout --foreground --signal INT --kill-after 20 "$1" python3 -m pytest -m gpu -n "${WORKERS:-8}" -v -rf --tb=short "${@:3}" \
    >"$folder/$2.log" 2>&1
}

for name in "$@"; do
  began=$SECONDS
  case "$name" in
    # These files alone: each process takes three times as long to collect all.
    # shellcheck disable=SC2046
    tests) tests 570 tests $(grep -rl --include='test_*.py' 'mark\.gpu' tests) ;;
    random) REGARD_FORMS=80 REGARD_DRAWS=125 tests 300 random tests/ops/test_gpu_random.py ;;
    attention) table 300 attention attention_gpu.py --rounds 3 ;;
    seeing) table 180 seeing seeing_gpu.py --rounds 3 ;;
    decode) table 60 decode decode_gpu.py --rounds 5 ;;
    lens) table 300 lens lens_gpu.py --no-eager --rounds 3 --zooms 2 ;;
    hf) table 240 hf hf_gpu.py --rounds 3 ;;
    train) table 300 train train_gpu.py --rule plain alibi-documents --rounds 2 ;;
    generate) table 240 generate generate.py --device cuda --rounds 3 ;;
    *) echo "$name is none of: tests random attention seeing decode lens hf train generate" >&2 && exit 2 ;;
  esac
  status=$?
  ((status == 124)) && said="stopped by its time" || said="exit $status"
  printf '%-10s %s, %d s: %s\n' "$name" "$said" $((SECONDS - began)) "$(tail -n 1 "$folder/$name.log" | cut -c1-200)"
done
