#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests bench/gpu/compare.py with stub programs: the order of the runs, the medians, the verdict.
set -eu
command -v python3 >/dev/null || { echo "left out: there is no python3"; exit 77; }
. "$(dirname "$0")/scratch.sh"

# A stub of gpu_bench that reports US twice and then 99: the median of three ignores the last value.
program() {
    cat >"$1" <<END
#!/bin/sh
echo "$1 \$*" >>runs
for word; do case \$word in json=*) json=\${word#json=} ;; esac; done
us=\$(grep -c "^$1" runs | sed 's/3/99/; t; s/.*/$2/')
printf '{"op":"plan","hidden":64,"top_k":2,"experts":8,"type":"bf16","quantize":0,' >\$json
printf '"layout":"expert","alignment":1,"padding":1,"routing":"zipf","scales":128,' >>\$json
printf '"windows":0,"tokens":4,"sms":8,"us":%s}\n' "\$us" >>\$json
sed 's/"windows":0/"windows":1/; s/"us".*/"us":70}/' \$json >\$json.windows
cat \$json.windows >>\$json
END
    chmod +x "$1"
}

compare() { python3 "$tests/../bench/gpu/compare.py" "$@" tokens=4 ops=L >said 2>&1; }

program old 10.0
program new 10.05
compare ./old ./new || fail "as fast: $(cat said)"
[ "$(cut -d ' ' -f 1 runs | tr '\n' ' ')" = "old new new old old new " ] || fail "$(cat runs)"
grep -q '^new tokens=4 ops=L json=' runs || fail "$(cat runs)"
grep -q 'plan 64 2 8 bf16 0 128 expert 1 1 zipf 0 4 8 * 10.00 * 10.05 * 1.005$' said || fail "$(cat said)"
grep -q 'zipf 1 4 8 * 70.00 * 70.00 * 1.000$' said || fail "windows are a case of their own: $(cat said)"

program new 12.5
rm runs
if compare ./old ./new; then fail "slower: $(cat said)"; fi
grep -q '1.250  SLOWER$' said || fail "$(cat said)"
rm runs
compare ./old ./new --limit 30 || fail "within the limit: $(cat said)"

printf '#!/bin/sh\necho "no such model"\nexit 3\n' >new
if compare ./old ./new; then fail "a program failed: $(cat said)"; fi
grep -q 'no such model' said && grep -q 'ended with 3' said || fail "$(cat said)"
