# shellcheck shell=bash disable=SC2154
# What `./run` needs first: Debian packages, .venv, the package itself.

fail() {
  printf 'run: %s\n' "$*" >&2
  exit 2
}

# step <label> <log> <command ...>: one line on the terminal, the end of the log if it fails.
step() {
  local label=$1 log=$logs/$2.txt start=$SECONDS
  shift 2
  printf '%-40s ' "$label"
  if "$@" >"$log" 2>&1; then
    printf 'ok %6ds\n' $((SECONDS - start))
  else
    printf 'FAILED, the end of %s:\n' "$log"
    tail -n 100 "$log"
    return 1
  fi
}

find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11 python3.10)
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

# missing_packages <group ...>: those of requirements/debian.txt whose check fails.
missing_packages() {
  local group package check
  while read -r group package check; do
    [[ " $* " == *" $group "* ]] || continue
    eval "$check" >/dev/null 2>&1 || printf '%s\n' "$package"
  done <requirements/debian.txt | sort -u
}

may_install() {
  command -v apt-get >/dev/null && { ((EUID == 0)) || sudo -n true 2>/dev/null; }
}

apt_install() {
  "${as_root[@]}" apt-get update &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install --yes --no-install-recommends "$@"
}

# ensure_packages <group ...>: what it will install, and by what, it says first.
ensure_packages() {
  local missing as_root=()
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ! may_install; then
    printf 'Packages are missing, and installing them needs root. Run this, then try again:\n\n'
    printf '  sudo apt-get install --yes --no-install-recommends %s\n\n' "${missing[*]}"
    return 1
  fi
  ((EUID == 0)) || as_root=(sudo -n)
  printf 'Debian packages are missing and will be installed now, as root:\n  %s\n' \
    "${as_root[*]}${as_root:+ }apt-get install --no-install-recommends ${missing[*]}"
  step 'apt-get install' apt apt_install "${missing[@]}"
}

venv_works() {
  "$python" -c 'import pip' 2>/dev/null
}

make_venv() {
  "$(find_python)" -m venv --clear .venv
}

pip_install() {
  "$python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@"
}

# Compiles in build/python, so that a second time only what changed is built, and with the options
# of the release build, so that ccache compiles the library once. The types of the C++ module, found by
# the build, also go beside the sources, where mypy and editors look for them.
install_package() {
  local shared='-DTOPREDUCE_UNITY=ON -DTOPREDUCE_WERROR=ON'
  SKBUILD_BUILD_DIR=build/python CMAKE_ARGS="$shared ${CMAKE_ARGS:-}" \
    pip_install --no-build-isolation --no-deps --force-reinstall . &&
    cp build/python/python/bindings/_core.pyi python/topreduce/
}

# digest <path ...>: one word that changes when any of the files does.
digest() {
  find "$@" -type f -not -path '*/__pycache__/*' -not -path 'python/tests/*' \
    -not -name '_core.pyi' -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1
}

# once <stamp> <word> <label> <log> <command ...>: runs the step unless it did for this word.
once() {
  local stamp=.venv/$1.stamp word=$2
  shift 2
  [[ -f $stamp && $(<"$stamp") == "$word" ]] && return
  rm -f "$stamp"
  step "$@" && printf '%s\n' "$word" >"$stamp"
}

# setup_tools <group ...>: packages, .venv and what goes into it; quick when all is there.
setup_tools() {
  setup_system "$@" && setup_requirements dev
}

# setup_system <group ...>: Debian packages, and an empty .venv.
setup_system() {
  mkdir -p "$logs"
  venv_works || set -- "$@" python
  ensure_packages "$@" || return
  use_ccache
  venv_works || step 'python environment .venv' venv make_venv
}

# Byte code comes with the first import, of those files only that we import: it must be kept, or every
# process would make it anew.
unset PYTHONDONTWRITEBYTECODE
# setup_requirements <list>: requirements/<list>.txt, where dev holds all of demo.
setup_requirements() {
  local file=requirements/$1.txt
  once "requirements-$1" "$("$python" -V) $(digest requirements/demo.txt "$file")" \
    "pip install -r $file" requirements pip_install --no-compile -r "$file"
}

setup_package() {
  once package "$(digest CMakeLists.txt pyproject.toml topreduce python)" \
    'pip install topreduce' package install_package
}

# Compilations are shared between build folders and between clones.
use_ccache() {
  ccache --show-stats >/dev/null 2>&1 || return 0
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
  # Depended-on files are compared, not preprocessed text: where nothing is found that saves a pass.
  export CCACHE_DEPEND=1
  # Files of a fresh clone are as new as their compilation.
  export CCACHE_SLOPPINESS=include_file_mtime,include_file_ctime
}
