# shellcheck shell=bash disable=SC2154
# `./run wheel`: what users install, and a look at it as they have it.

# The wheel is made from the sdist, so the sdist has all it takes.
build_wheel() {
  rm -rf build/wheel dist && mkdir -p build/wheel &&
    "$python" -m build --no-isolation --outdir build/wheel .
}

# Libraries that not every Linux has come into the wheel; what else it needs gives it its platform.
repair_wheel() {
  PATH=$root/.venv/bin:$PATH "$python" -m auditwheel repair --wheel-dir dist build/wheel/*.whl &&
    mv build/wheel/*.tar.gz dist/ &&
    "$python" -m auditwheel show dist/*.whl
}

# An environment that has nothing but the wheel and torch, and no compiler on its path.
try_wheel() {
  local venv=$root/build/wheel/venv torch
  torch=$(grep '^torch==' requirements/demo.txt)
  "$(find_python)" -m venv "$venv" &&
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off \
      dist/*.whl "$torch" || return
  # shellcheck disable=SC2016 # for the other shell
  (cd "$venv" && env -i PATH="$venv/bin" HOME="$venv" LANG=C.UTF-8 /bin/bash -eu -c '
    if command -v cc c++ gcc g++ cmake; then exit 1; fi
    python -c "import topreduce; print(topreduce.__file__, topreduce.__version__)"
    topreduce methods topk
    torchrun --nproc-per-node 2 "$0"/examples/torch_ddp.py' "$root")
}

wheel() {
  once wheel "$(digest requirements/wheel.txt)" 'pip install -r requirements/wheel.txt' wheel-tools \
    pip_install -r requirements/wheel.txt &&
    step 'sdist, and wheel from it' wheel build_wheel &&
    step 'auditwheel' auditwheel repair_wheel &&
    step 'attach, in an empty environment' wheel-try try_wheel &&
    printf '%s\n' dist/*
}
