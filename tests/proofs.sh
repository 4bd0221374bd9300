#!/usr/bin/env bash
# Runs the long checks of the contract. Each check prints its figures, and fails if a figure is
# wrong.
#
#   tests/proofs.sh           in full
#   tests/proofs.sh --short   a tenth of the work, as in .ci/run
#
# PROOF_ITERS, PROOF_SEEDS, PROOF_PROGRAMS, PROOF_FLOODS, PROOF_KILLS, PROOF_CYCLES, PROOF_ATOMICS,
# PROOF_PINGPONGS, PROOF_MATCHES, PROOF_WORDS and PROOF_SCHEDULES set the lengths.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
source tests/need.sh
source tests/beside.sh

share=1
[ "${1:-}" = --short ] && share=10
iters=${PROOF_ITERS:-$((10000000 / share))}
seeds=${PROOF_SEEDS:-$((10000 / share))}
programs=${PROOF_PROGRAMS:-$((100000 / share))}
kills=${PROOF_KILLS:-$((500 / share))}
cycles=${PROOF_CYCLES:-$((1000 / share))}
atomics=${PROOF_ATOMICS:-$((1000000 / share))}
schedules=${PROOF_SCHEDULES:-$((100000 / share))}
floods=${PROOF_FLOODS:-$((1000000 / share))}
pingpongs=${PROOF_PINGPONGS:-$((10000000 / share))} # over all tests of parking together

matches=${PROOF_MATCHES:-40000000} # random operations of tag matching; half a minute, short or not
words=${PROOF_WORDS:-6}            # operations per sequence; 7 take a quarter of an hour

need jq jq || { echo "SKIPPED proofs: jq is missing and cannot be installed"; exit 77; }
# The tool's package is named, so that libraries have the features that they have in the tool, and
# none is built twice. The tests are built with one command, because cargo builds them in parallel.
gpu=(cargo test --release --locked --quiet --package fishplate-tool --package fishplate-gpu)
tests=("${gpu[@]}" --package fishplate-core --package fishplate-sys)
cargo build --release --locked --quiet && "${tests[@]}" --no-run --test linux --test twosided \
    --test failover --test tag --test memory && "${gpu[@]}" --no-run --lib || exit
fishplate=${CARGO_TARGET_DIR:-target}/release/fishplate
log=$(mktemp)
trap 'beside_end; rm -f "$log" "$log.met" "$log.still" "$log.beside" "$log.untimed"' EXIT
failed=()

# proof NAME COMMAND...: runs a check, and prints its result and duration
proof() {
    local name=$1 start=$SECONDS
    shift
    printf -- '-- %s\n' "$name"
    "$@" || { failed+=("$name"); echo "FAILED $name"; }
    echo "   $((SECONDS - start)) s"
}

put_signal_checked() {
    "$fishplate" perf put-signal --transport shm -s 8 --check -n "$iters" --format json \
        --timeout 600 >"$log" || return
    jq -r '"   \(.checked) of \(.iters) payloads verified, \(.errors) errors, \(.signals_misordered) misordered, p50 \(.lat_ns.p50) ns, floor \(.floor_ns) ns"' "$log"
    jq -e --argjson n "$iters" '.checked >= $n and .errors == 0 and .signals_misordered == 0' \
        "$log" >/dev/null
}

simulated_seeds() {
    "$fishplate" perf put-signal --transport sim --rails 4 --seed 1 --seeds "$seeds" --check \
        --format json --timeout 1200 >"$log" || return
    jq -rs '"   \(map(.iters) | add) put-signals, \(map(.arrivals_out_of_order) | add) arrivals out of order, \(map(.signals_misordered) | add) signals misordered, \(map(.errors) | add) errors"' "$log"
    jq -es 'map(.errors + .signals_misordered) | add == 0' "$log" >/dev/null &&
        jq -es 'map(.arrivals_out_of_order) | add > 0' "$log" >/dev/null
}

tagged_checked() {
    "$fishplate" perf tag-bw --transport shm -s 8,4K,20K --check -n "$((iters / 20))" \
        --format json --timeout 600 >"$log" || return
    jq -r '"   \(.checked) of \(.iters) messages of \(.size) bytes verified, \(.errors) errors"' \
        "$log"
    jq -es --argjson n "$((iters / 20))" 'all(.[]; .checked >= $n and .errors == 0)' "$log" \
        >/dev/null
}

tagged_seeds() {
    FISHPLATE_SEEDS=$seeds timeout 3000 "${tests[@]}" --test twosided -- \
        messages_match_in_the_order_sent_over_four >"$log" 2>&1
    local status=$?
    grep -E 'seed|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

failing_rails() {
    FISHPLATE_SEEDS=$schedules timeout 3000 "${tests[@]}" --test failover -- \
        in_schedules --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'seed|schedules:|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

closing_rails() {
    FISHPLATE_SEEDS=$((schedules / 10)) timeout 3000 "${tests[@]}" --test failover -- \
        with_several_cuts --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'seed|Totals|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

# Uses the debug build, because it has more checks and usually exists already.
memory_oracle() {
    FISHPLATE_PROGRAMS=$programs timeout 3000 cargo test --locked --quiet --test oracle -- \
        memory_is --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'programs|SKIPPED|FISHPLATE_SEED|test result' "$log" | sed 's/^\.* */   /'
    return $status
}

shared_words() {
    FISHPLATE_ATOMICS=$atomics timeout 3000 cargo test --locked --quiet --workspace \
        --test fabric -- atomics_of_two_peers --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'executed by|SKIPPED|test result|panicked' "$log" | sed 's/^\.* */   /'
    return $status
}

tagged_flood() {
    FISHPLATE_FLOOD=$floods timeout 3000 "${tests[@]}" --test twosided -- \
        a_flood_ --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'messages,|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

# Kills one of two connected processes at a random moment. The other process must then fail. The
# median time until that failure must be below 100 ms; other load delays some. The next pair under
# the same name must connect.
kill_nine() {
    local pair=@fishplate-proof-$$ before after victim survivor began status took=() tries n
    local run=("$fishplate" perf put-signal --transport shm -s 8 -n 1000000000 --pin none \
        --region 1M --timeout 600)
    before=$(ls -A /dev/shm | grep fishplate)
    for ((n = 0; n < kills; n++)); do
        "${run[@]}" --listen $pair >/dev/null 2>"$log" &
        local one=$!
        : >"$log.met"
        "${run[@]}" --connect $pair >"$log.met" 2>>"$log" &
        local two=$!
        # A process prints a line once the two are connected.
        for ((tries = 0; tries < 2000; tries++)); do
            [ -s "$log.met" ] && break
            sleep 0.01
        done
        sleep "0.$(printf %03d $((RANDOM % 200)))"
        if ((RANDOM % 2)); then victim=$one survivor=$two; else victim=$two survivor=$one; fi
        if ! kill -0 $victim 2>/dev/null || ! kill -0 $survivor 2>/dev/null; then
            echo "   round $n: a side ended by itself:"
            cat "$log"
            return 1
        fi
        began=${EPOCHREALTIME/./}
        kill -9 $victim
        status=0
        wait $survivor || status=$?
        took+=($((${EPOCHREALTIME/./} - began)))
        wait $victim 2>/dev/null
        [ $status = 1 ] || { echo "   round $n: the survivor ended with status $status:"
            cat "$log"; return 1; }
    done
    after=$(ls -A /dev/shm | grep fishplate)
    mapfile -t took < <(printf '%s\n' "${took[@]}" | sort -n)
    local median=${took[kills / 2]} worst=${took[kills - 1]}
    echo "   $kills kills: every survivor ended with an error, in the median after $median us, the slowest after $worst us; our names in /dev/shm unchanged: $([ "$before" = "$after" ] && echo yes || echo no)"
    [ "$before" = "$after" ] && ((median < 100000 && worst < 20000000))
} 2>/dev/null # where bash reports each kill

# Runs beside other checks, because it mostly sleeps. Uses the debug build, like memory_oracle.
stands_still() {
    timeout 600 cargo test --locked --quiet --workspace --test cli_fabric -- \
        a_side_that_stands_still --ignored --nocapture >"$log.still" 2>&1
}

stood_still() {
    wait "$still"
    local status=$?
    grep -E 'SKIPPED|test result|panicked' "$log.still" | sed 's/^\.* */   /'
    return $status
}

# Checks that all opened device memory is closed, and that nothing of a killed peer is left.
memory_cycles() {
    FISHPLATE_STRESS=$cycles timeout 3000 "${tests[@]}" --test memory -- \
        b20_ --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'seed|connections|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

memory_model() {
    FISHPLATE_SEEDS=$((seeds / 10)) timeout 3000 "${gpu[@]}" --lib -- \
        tests::model --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'seeds from|begun|test result|panicked' "$log" | sed 's/^ */   /'
    return $status
}

no_lost_wake_up() {
    local kinds
    kinds=$(grep -c '^fn no_wake_up_is_lost' sys/tests/linux/park.rs)
    FISHPLATE_STRESS=$((pingpongs / kinds)) timeout 3000 "${tests[@]}" --test linux -- \
        no_wake_up_is_lost a_parked_thread_uses_no_processor --test-threads 1 --nocapture >"$log" \
        2>&1
    local status=$?
    grep -E 'meetings|round trips|parks|test result|panicked|processor' "$log" | sed 's/^ */   /'
    return $status
}

tag_matching() {
    FISHPLATE_TAG_OPS=$matches FISHPLATE_TAG_WORDS=$words timeout 3000 "${tests[@]}" \
        --test tag -- differential exhaustive --nocapture >"$log" 2>&1
    local status=$?
    grep -E 'SEED|words of|panicked|seed' "$log" |
        sed 's/, MatcherConfig.*first_seq[^,]*,/:/; s/^/   /'
    return $status
}

# untimed: random programs from seeds, each on one thread
untimed() {
    log=$log.beside
    proof "rails that fail and return in the simulator, every operation once and in order: $schedules schedules" failing_rails
    proof "several links that fail at once on rails that close endpoints: $((schedules / 10)) schedules" closing_rails
    proof "tagged messages over 4 simulated rails, matched in the order sent: $seeds seeds" \
        tagged_seeds
    proof "device memory: random work of two processes against a model: $((seeds / 10)) seeds" \
        memory_model
    proof "tag matching against two lists: $matches operations, every word of $words letters" \
        tag_matching
    [ ${#failed[@]} = 0 ]
}

echo "-- proofs that measure no time run beside the others"
beside "$log.untimed" untimed
stands_still &
still=$!
python_calls() {
    local status=0
    tests/sanitize.sh python || status=$?
    [ $status = 0 ] || [ $status = 77 ]
}

proof "put-signal over shared memory, every payload verified: $iters" put_signal_checked
proof "simulated fabric, 4 rails: $seeds seeds" simulated_seeds
proof "random programs over each rail, and the memory that they leave: $programs each" memory_oracle
proof "tagged messages over shared memory, every payload verified" tagged_checked
proof "atomics that two peers mix, by providers and by engines, explained by one order: $atomics over each" shared_words
proof "unexpected messages against a sleeping receiver: $floods" tagged_flood
proof "kill -9 of either side: $kills" kill_nine
proof "device memory: connect, transfer, kill: $cycles" memory_cycles
proof "ping-pongs with random delays between threads that park: $pingpongs" no_lost_wake_up
proof "a side over tcp that stands still for 12 s, which is longer than an operation may take by default" stood_still
beside_done || failed+=("what ran beside the others")
# Takes minutes, mostly to build with sanitizers.
if [ $share = 1 ]; then
    proof "random calls from Python, under AddressSanitizer" python_calls
    proof "bugs planted in failover, each found by a simulated schedule" tests/failover-mutants.sh
fi

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all proofs hold"
