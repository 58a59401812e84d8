# shellcheck shell=bash disable=SC2154
# `./run claims`.

# Scripts that can be started; the others in the folder are what they share.
claim_names() {
  grep -l '^    claim = Claim(' bench/claims/*.py | sed -E 's,.*/([a-z]+)\.py,\1,'
}

claims() {
  local name known names=() options=() status=0
  mapfile -t known < <(claim_names)
  for name in "$@"; do
    if [[ $name == --* ]]; then
      options+=("$name")
    else
      [[ " ${known[*]} " == *" $name "* ]] || fail "unknown claim '$name'; known: ${known[*]}"
      names+=("$name")
    fi
  done
  ((${#names[@]})) || names=("${known[@]}")
  setup_tools build test lab docs && setup_package || return
  [[ ! " ${names[*]} " =~ ' '(arc|lab|scale|volume)' ' ]] || build bench || return
  for name in "${names[@]}"; do
    printf '\n== %s\n' "$name"
    "$python" "bench/claims/$name.py" "${options[@]}" || status=1
  done
  return "$status"
}
