# shellcheck shell=bash disable=SC2154
# `./run bench`.

# bench_names: programs built from bench/*_bench.cpp, and bench/*.py.
bench_names() {
  find bench -maxdepth 1 \( -name '*_bench.cpp' -o -name '[!_]*.py' \) -printf '%f\n' |
    sed -E 's/(_bench)?\.[a-z]+$//' | LC_ALL=C sort
}

bench() {
  local name known names=() status=0
  mapfile -t known < <(bench_names)
  while (($#)) && [[ $1 != -- ]]; do
    [[ " ${known[*]} fuzz " == *" $1 "* ]] ||
      fail "unknown benchmark '$1'; known: ${known[*]} fuzz"
    names+=("$1")
    shift
  done
  [[ ${1:-} != -- ]] || shift
  # Those run for many minutes: only by their names.
  ((${#names[@]})) || mapfile -t names < <(bench_names | grep -vxE 'auto|quality|values')

  setup_tools build test lab docs && setup_package || return
  [[ ${names[*]} == fuzz ]] || build bench || return
  for name in "${names[@]}"; do
    printf '\n== %s\n' "$name"
    if [[ $name == fuzz ]]; then
      build fuzz && run_fuzz "$@" || status=1
    elif [[ -f bench/$name.py ]]; then
      "$python" "bench/$name.py" "$@" || status=1
    else
      "build/bench/bench/${name}_bench" "$@" || status=1
    fi
  done
  return "$status"
}
