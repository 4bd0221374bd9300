#!/usr/bin/env bash
# Checks the static tracing probes of the feature `probes`. A program with the feature has an ELF
# note for each probe, with the address of a nop. A program without the feature has no such notes.
# Needs no tracer.
set -euo pipefail
cd "$(dirname "$0")/.."
source tests/need.sh

need readelf binutils || { echo "SKIPPED probes: readelf is missing and cannot be installed"
    exit 77; }
case $(uname -m) in x86_64 | aarch64) ;; *) echo "SKIPPED probes: none on $(uname -m)"
    exit 77 ;; esac

program=${CARGO_TARGET_DIR:-target}/debug/examples/tagged
# notes FEATURES...: builds the example `tagged` with these features, and prints the notes of its
# probes
notes() {
    cargo build --quiet --locked --package fishplate --example tagged "$@"
    readelf --notes --wide "$program" 2>/dev/null | grep -A4 NT_STAPSDT || true
}

found=$(notes --features probes)
failed=0
for name in peer_up peer_down rail_up rail_down stall_begin stall_end rendezvous_begin \
    rendezvous_end; do
    places=$(grep -A1 "Name: $name\$" <<<"$found" |
        sed -n 's/.*Location: \(0x[0-9a-f]*\),.*/\1/p') || true
    [ -n "$places" ] || { failed=1; echo "FAILED  no probe $name"; }
    for place in $places; do
        code=$(objdump -d "$program" --start-address="$place" --stop-address=$((place + 1)) |
            tail -n 1)
        [[ $code == *nop* ]] || { failed=1; echo "FAILED  $name at $place is no nop: $code"; }
    done
    arguments=$(grep -A2 "Name: $name\$" <<<"$found" |
        grep -c 'Arguments: 8@[%x][a-z0-9]* 8@[%x][a-z0-9]*$') || true
    [ "$arguments" = "$(wc -w <<<"$places")" ] || { failed=1; echo "FAILED  arguments of $name"; }
done
[ -z "$(notes)" ] || { failed=1; echo "FAILED  probes without the feature"; }
[ $failed = 0 ] && echo "ok      8 probes, each a nop; none without the feature"
exit $failed
