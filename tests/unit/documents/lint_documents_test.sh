#!/usr/bin/env bash
# deploy/lint_documents.py finds each kind of fault, and nothing in a document without any.
set -euo pipefail
if ! command -v python3 >/dev/null; then echo "skipped: python3 is not installed"; exit 77; fi
check=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)/deploy/lint_documents.py
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir "$root/proto"
cat >"$root/proto/GLOSSARY.md" <<'END'
## Old words

| old words | instead | checked in |
|---|---|---|
| `kernel that stays`, `culprit` | resident kernel, failed rank | documents |
| `frobnicate` | enqueue | code |
END

# expect TEXT: the check fails and says TEXT of the document on standard input; "": it finds nothing.
expect() {
  local output status=0
  cat >"$root/a.md"
  output=$("$check" --root "$root" a.md) || status=$?
  if [[ -z $1 && $status == 0 && -z $output ]]; then return; fi
  if [[ -n $1 && $status == 1 && $output == *"$1"* ]]; then return; fi
  printf 'status %s, expected "%s", got: %s\nof:\n' "$status" "$1" "$output"
  cat "$root/a.md"
  exit 1
}

long=$(printf 'word %.0s' {1..25})
expect '' <<<"# A heading
A [link](proto/GLOSSARY.md#old-words), [a heading](#a-heading), [outside](https://example.org/x).
| a table | $long |"
expect 'a.md:2: has 125 columns; allowed: 100' <<<"
$long"
expect 'a.md:1: links to nowhere.md: there is no nowhere.md' <<<'A [link](nowhere.md).'
expect 'a.md:1: links to proto/GLOSSARY.md#new-words: there is no such heading' <<<'[A](proto/GLOSSARY.md#new-words)'
expect "a.md:2: says 'culprit'; the glossary says: resident kernel, failed rank" <<<'
The culprit is rank 2.'
expect "a.md:1: says 'kernel that stays'" <<<'A kernel that
stays on the device.'
expect "a.md:1: says 'culprit'" <<<'| a *culprit* in a table |'
expect '' <<<'The field `culprit`, a frobnicate (of code), culprits, and

```
a culprit in a code fence
```'

# Sources: words in comments and parts of names.
if command -v git >/dev/null; then
  echo '# A heading' >"$root/a.md"
  printf 'int x;  // frobnicate\nint do_frobnicate_all();\nint unfrobnicated();\n' >"$root/a.h"
  git -C "$root" init -q
  git -C "$root" add a.h a.md
  status=0
  output=$("$check" --root "$root") || status=$?
  for line in 1 2; do
    if [[ $output != *"a.h:$line: says 'frobnicate'; the glossary says: enqueue"* ]]; then
      printf 'line %s of a source was not found; status %s, got: %s\n' "$line" "$status" "$output"
      exit 1
    fi
  done
  if [[ $status != 1 || $output == *a.h:3* ]]; then echo "status $status, got: $output"; exit 1; fi

  # A README that is too long, a file name too often, a room that declares in epd itself.
  seq 151 >"$root/README.md"
  mkdir -p "$root"/{x,y,z,daemon/base,daemon/room}
  touch "$root"/{x,y,z}/a.h
  printf 'namespace epd {\n' | tee "$root/daemon/base/b.h" >"$root/daemon/room/c.h"
  git -C "$root" add .
  output=$("$check" --root "$root") || true
  for text in 'README.md:151: has 151 lines; allowed: 150' 'a.h:1: has the file name of 4 sources; allowed: 3' \
    'daemon/room/c.h:1: declares in epd itself'; do
    if [[ $output != *"$text"* ]]; then printf 'not found: %s, got: %s\n' "$text" "$output"; exit 1; fi
  done
  if [[ $output == *base/b.h* ]]; then echo "got: $output"; exit 1; fi

  # Comments and list items without a subject, in folders that are clean.
  mkdir -p "$root"/{kernels,tests,elsewhere}
  printf '// Of the call.\n// A call.\nint y;  // of the call\n/* What is called. */\n/// Whoever calls.\nint Of;\n' \
    | tee "$root/kernels/h.cuh" >"$root/elsewhere/e.h"
  printf '# By its caller.\n"""To be called."""\nx = "Of text"\n' >"$root/tests/t.py"
  printf '// With a reply.\nmessage M {}\n' >"$root/kernels/k.proto"
  printf -- '- Of several calls.\n- **Calls.** Who calls.\n- Calls.\n\nOf prose.\n' >"$root/tests/l.md"
  git -C "$root" add .
  output=$("$check" --root "$root" | grep 'begins with' || true)
  wanted="tests/l.md:1: begins with 'Of'
tests/l.md:2: begins with 'Who'
kernels/h.cuh:1: begins with 'Of'
kernels/h.cuh:4: begins with 'What'
kernels/h.cuh:5: begins with 'Whoever'
kernels/k.proto:1: begins with 'With'
tests/t.py:1: begins with 'By'
tests/t.py:2: begins with 'To be'"
  if [[ $(sort <<<"${output//; allowed: a subject and its verb (CONTRIBUTING.md)/}") != $(sort <<<"$wanted") ]]; then
    printf 'wanted:\n%s\ngot:\n%s\n' "$wanted" "$output"
    exit 1
  fi
fi
echo "every fault was found"
