# shellcheck shell=bash disable=SC2154
# The parts of `./run test`, and how they are told of.

check_format() {
  find . \( -path ./build -o -path ./.venv -o -path ./.git \) -prune -o \
    -type f \( -name '*.h' -o -name '*.cpp' \) -print0 |
    xargs -0 clang-format-14 --dry-run -Werror
}

lint() {
  local status=0
  step 'clang-format' clang-format check_format || status=1
  step 'ruff check' ruff-check "$python" -m ruff check . || status=1
  step 'ruff format' ruff-format "$python" -m ruff format --check . || status=1
  step 'mypy --strict' mypy "$python" -m mypy || status=1
  step 'shellcheck' shellcheck \
    shellcheck run tools/*.sh .ci/run .github/address cmake/aarch64-libraries tests/consumer/check || status=1
  return "$status"
}

# A broken link, or a comment that Doxygen cannot follow, fails.
docs() {
  step 'docs' docs cmake -P docs/site/make.cmake
}

compile() {
  cmake --preset "$1" && cmake --build --preset "$2" --parallel "$jobs" -- -k 0
}

# build <preset>
build() {
  local configure=$1
  [[ $1 != mpi && $1 != large ]] || configure=release
  [[ $1 != aarch64 ]] || step 'aarch64: libraries' aarch64-libraries cmake/aarch64-libraries || return
  step "$1: build" "$1-build" compile "$configure" "$1"
}

# From here on this shell, and what it starts, only takes what tests leave of the processors.
yield_to_tests() {
  renice -n 19 -p "$BASHPID" >/dev/null
}

# builds <preset ...>: one after the other, beside tests; what they say waits for `cpp`.
builds() {
  local name
  yield_to_tests
  for name in "$@"; do
    build "$name" >"$logs/$name.building" 2>&1
    printf '%d\n' $? >"$logs/$name.built"
  done
}

# await <file> <process>: until it has written the file, or is gone.
await() {
  until [[ -s $1 ]] || ! kill -0 "$2" 2>/dev/null; do sleep 0.2; done
}

# cpp <preset> [options of ctest]; many tests sleep now and then, so one more than cores.
cpp() {
  local preset=$1
  shift
  await "$logs/$preset.built" "$builder"
  cat "$logs/$preset.building"
  (($(<"$logs/$preset.built") == 0)) && step "$preset: tests" "$preset" ctest --preset "$preset" \
    --parallel $((jobs + 1)) --no-tests=error --output-junit "$root/$logs/$preset.xml" "$@"
}

# A file stays with one of the workers: its tests share process groups. conftest.py has the order.
run_pytest() {
  timeout --foreground --kill-after=10 1800 "$python" -m pytest -q --color=no \
    -n $((jobs < 4 ? jobs + 1 : 4)) --dist loadfile --no-loadscope-reorder \
    --junit-xml="$logs/python.xml" "$@"
}

# run_fuzz [options]: starts from the committed corpora; what it finds new stays in build/fuzz.
run_fuzz() {
  local name status=0
  for name in payload frame spec state; do
    mkdir -p "build/fuzz/found/$name"
    UBSAN_OPTIONS=print_stacktrace=1:${UBSAN_OPTIONS:-} "build/fuzz/tests/fuzz/${name}_fuzz" \
      -artifact_prefix="build/fuzz/$name-" -max_len=2000 -malloc_limit_mb=64 -timeout=10 \
      -print_final_stats=1 "$@" "build/fuzz/found/$name" "tests/fuzz/corpus/$name" || status=1
  done
  return "$status"
}

fuzz() {
  build fuzz && step 'fuzz: 4 x 5 s' fuzz run_fuzz -max_total_time=5
}

# part <name> <command ...>: runs it, and leaves its name, verdict, seconds and numbers of passed and
# failed tests in build/log/<name>.part. A part without tests counts as one, and so does one that
# fails although no test did.
part() {
  local name=$1 start=$SECONDS verdict=ok passed=1 failed=0
  shift
  rm -f "$logs/$name.xml"
  "$@" || verdict=FAILED
  if [[ -f $logs/$name.xml ]]; then
    read -r passed failed < <("$python" tests/tally.py "$name" "$logs/$name.xml") ||
      { verdict=FAILED && passed=0 failed=0; }
  fi
  [[ $verdict == ok || $failed != 0 ]] || failed=1
  ((failed == 0)) || verdict=FAILED
  [[ -f $logs/$name.xml ]] || passed=$((1 - failed))
  printf '%s %s %d %d %d\n' "$name" "$verdict" $((SECONDS - start)) "$passed" "$failed" \
    >"$logs/$name.part"
}

parts_beside() {
  local name
  for name in "$@"; do
    part "$name" "$name"
    yield_to_tests # but for the first of them, which the Python tests wait for
  done
}

package() {
  setup_requirements dev && setup_package
}

# The tests run one part after the other, those of Python first, then those of which ccache has most
# when the package is there. What is built for the next ones goes on beside them, and so do lint, docs
# and fuzz.
run_tests() {
  local name beside=() main=() presets=() files=() groups=(build test lab docs) helper builder
  while (($#)); do
    case $1 in
      --) shift && break ;;
      --long) export TOPREDUCE_LONG_TESTS=1 ;; # tests/tiers.h and python/tests/tiers.py read it
      cpp) main+=(release asan tsan) ;;
      lint | docs | fuzz) beside+=("$1") ;;
      asan | tsan | release | mpi | large | python) main+=("$1") ;;
      mpich | aarch64) main+=("$1") && groups+=("$1") ;;
      *) fail "unknown part '$1'; known: lint, docs, asan, tsan, release, cpp, mpi, mpich," \
        "large, python, fuzz, aarch64" ;;
    esac
    shift
  done
  ((${#main[@]} + ${#beside[@]})) || beside=(lint docs) main=(python release mpi asan tsan)

  if [[ " ${main[*]} ${beside[*]} " =~ ' '(python|lint)' ' ]]; then beside=(package "${beside[@]}"); fi

  if ! setup_system "${groups[@]}"; then
    printf '0 passed, 1 failed\n'
    return 1
  fi
  rm -f "$logs"/*.part "$logs"/*.built
  parts_beside "${beside[@]}" >"$logs/beside.txt" 2>&1 &
  helper=$!
  for name in "${main[@]}"; do [[ $name == python ]] || presets+=("$name"); done
  builds "${presets[@]}" &
  builder=$!
  for name in "${main[@]}"; do
    if [[ $name == python ]]; then
      await "$logs/package.part" "$helper"
      part python step pytest pytest run_pytest "$@"
    else
      part "$name" cpp "$name" "$@"
    fi
  done
  wait && cat "$logs/beside.txt"

  printf '\n'
  for name in "${beside[@]}" "${main[@]}"; do files+=("$logs/$name.part"); done
  cat "${files[@]}" | awk -v parts=${#files[@]} '
    { printf "%-8s %-6s %5d s %6d passed %6d failed\n", $1, $2, $3, $4, $5
      passed += $4; failed += $5 }
    END { failed += parts - NR  # one that never came to its end
          printf "%d passed, %d failed\n", passed, failed
          exit failed > 0 }'
}
