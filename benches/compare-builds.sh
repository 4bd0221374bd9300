#!/usr/bin/env bash
# Compares two builds of the tool, run in alternation, to show the effect of a change.
#
# usage: benches/compare-builds.sh OLD NEW [rounds]; OLD and NEW are paths of `fishplate` programs
#
# Each round runs every row once with each build, in alternating order. A row's figure is the median
# over the rounds of nanoseconds per operation (latency rows: p50; rate rows: time divided by
# messages), and the median of the ratios new / old. Only pairs of runs whose floors agree within
# 15 % count for the ratios, since a virtual machine may move between processors.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2; }
old=$1 new=$2 rounds=${3:-7}
rows=("put-signal 8" "put-signal 4K" "put 8" "put 4K" "tag 8" "tag 4K" "tag-bw 8" "tag-bw 4K")

data=$(mktemp)
trap 'rm -f "$data"' EXIT

field() { sed -n "s/.*\"$1\":\([0-9.eE+-]*\).*/\1/p" <<<"$2"; }

# once BUILD PROGRAM TEST SIZE: runs a test once; prints row, round, build, nanoseconds, floor
once() {
    local out ns
    out=$("$2" perf "$3" -s "$4" -n 300000 --format json 2>/dev/null | grep '^{' | tail -n 1)
    case $3 in
        put | tag-bw) ns=$(awk -v rate="$(field msgs_per_s "$out")" 'BEGIN { print 1e9 / rate }') ;;
        *) ns=$(field p50 "$out") ;;
    esac
    echo "$3-$4 $round $1 $ns $(field floor_ns "$out")" >>"$data"
}

for ((round = 0; round < rounds; round++)); do
    for row in "${rows[@]}"; do
        # shellcheck disable=SC2086
        if ((round % 2)); then
            once new "$new" $row && once old "$old" $row
        else
            once old "$old" $row && once new "$new" $row
        fi
    done
done

awk '
    function median(list, n,    i, j, t) {
        for (i = 2; i <= n; i++)
            for (j = i; j > 1 && list[j] < list[j - 1]; j--) {
                t = list[j]; list[j] = list[j - 1]; list[j - 1] = t
            }
        return n % 2 ? list[(n + 1) / 2] : (list[n / 2] + list[n / 2 + 1]) / 2
    }
    {
        if (!($1 in seen)) { seen[$1]; order[++rows] = $1 }
        ns[$1, $3, $2] = $4; floor[$1, $3, $2] = $5
        if ($2 > last) last = $2
    }
    END {
        printf "%-14s %10s %10s %8s %6s\n", "row", "old ns", "new ns", "new/old", "pairs"
        for (r = 1; r <= rows; r++) {
            row = order[r]; n = 0
            for (k = 0; k <= last; k++) {
                a = floor[row, "old", k]; b = floor[row, "new", k]
                if (a == 0 || b == 0 || a / b > 1.15 || b / a > 1.15) continue
                n++; o[n] = ns[row, "old", k]; w[n] = ns[row, "new", k]; q[n] = w[n] / o[n]
            }
            if (n == 0) { printf "%-14s no pair at one floor\n", row; continue }
            printf "%-14s %10.1f %10.1f %8.3f %6d\n", row, median(o, n), median(w, n),
                median(q, n), n
        }
    }' "$data"
