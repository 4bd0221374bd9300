# shellcheck shell=bash Sourced by scripts. Plants one bug after another in a copy of the tree, and
# checks that a test fails each time. A mutant is a line of the table that `mutants` prints: name,
# file, expression, replacement. The expression must occur exactly once in the file; otherwise the
# run fails, and the line must be adapted to the code.
#
# The script that sources this file defines `mutants`, and sets:
#   under     the folder of the files in the table
#   suite     the test target of fishplate-core
#   chosen    arguments of the test binary, an array
#   limit_s   processor time for one run of the tests, in seconds
#   first     a prefix of the command for the run without a mutant, an array, may be empty
#   failure   a pattern for the lines of the output that show a failure; the text in \(\) says which

# plant NAME WHAT [MUTANT...]: runs the mutants, by default all; the copy of the tree is in the
# folder NAME of the target folder
plant() {
    local copy=${CARGO_TARGET_DIR:-target}/$1 what=$2 log survived=0 known=0
    local name file from to source began by
    shift 2
    mkdir -p "$copy/tree" && copy=$(cd "$copy" && pwd)
    rm -rf "$copy/tree" && mkdir "$copy/tree"
    git ls-files -z --cached --others --exclude-standard |
        xargs -0 cp --parents -t "$copy/tree" || return
    # Each mutant changes one file, so incremental builds are faster.
    export CARGO_TARGET_DIR=$copy/target CARGO_INCREMENTAL=1 CARGO_PROFILE_TEST_DEBUG=0
    export CARGO_PROFILE_DEV_DEBUG=0 RUST_BACKTRACE=0
    log=$copy/log

    run_tests "${first[@]}" || { cat "$log"; echo "FAILED    $what as it stands"; return 1; }
    echo "ok        $what as it stands"
    while IFS='~' read -r name file from to; do
        [ $# = 0 ] || [[ " $* " = *" $name "* ]] || continue
        known=$((known + 1))
        source=$copy/tree/$under/$file
        cp "$source" "$copy/original"
        # A space in an expression matches any white space.
        if ! from=$from to=$to perl -0pi -e '
            my $from = join("\\s+", map { quotemeta } split(/\s+/, $ENV{from}));
            my $count = () = /$from/g;
            die "found $count times\n" if $count != 1;
            s/$from/$ENV{to}/' "$source" 2>"$log"; then
            echo "STALE     $name: $(cat "$log")"
            survived=1
        else
            touch "$source"
            began=$SECONDS
            run_tests
            case $? in
                0) echo "SURVIVED  $name: no test fails"; survived=1 ;;
                1)
                    echo "STALE     $name: does not compile"
                    grep -m 3 "^error" "$log"
                    survived=1
                    ;;
                *)
                    by=$(sed -n "s/$failure.*/\1/p" "$log" | head -n 1)
                    by=${by:-a loop that does not end}
                    echo "caught    $name, by $by, $((SECONDS - began)) s"
                    ;;
            esac
        fi
        cp "$copy/original" "$source"
        touch "$source"
    done < <(mutants | sed -E 's/([^\\]) +\| /\1~/g; s/ +\|$/~/; s/ +\| *$/~/; s/\\\|/|/g')
    [ "$known" -gt 0 ] || { echo "no such mutant: $*"; return 1; }
    return $survived
}

# run_tests [PREFIX...]: builds and runs the tests, until one fails. Status 1: the build failed.
# 2: a test failed, or the time limit expired, because some mutants loop for ever.
run_tests() {
    local binary pid
    binary=$(cd "$copy/tree" &&
        cargo test --quiet --locked --package fishplate-core --test "$suite" --no-run \
        --message-format=json-render-diagnostics 2>"$log" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    [ -n "$binary" ] || return 1
    : >"$log" # the loop below must not read the failure of an earlier run
    (ulimit -t "$limit_s"; exec "$@" "$binary" "${chosen[@]}" >"$log" 2>&1) &
    pid=$!
    while kill -0 $pid && ! grep -q "$failure" "$log"; do
        sleep 0.1; done
    kill -9 $pid
    wait $pid && return 0 || return 2
} 2>/dev/null # where bash reports the kill
