#!/usr/bin/env bash
# Plants one bug after another in a copy of failover, and checks that a simulated schedule finds
# each. Prints the seed that finds it: `FISHPLATE_SEED=n cargo test --package fishplate-core --test
# failover run::` repeats the schedule.
#
# usage: tests/failover-mutants.sh [name...] (default: all of them; about two minutes on two cores)
# FISHPLATE_SEEDS: number of schedules for each mutant (default 400)
set -u
cd "$(dirname "$0")/.." || exit
source tests/mutants.sh

mutants() {
    cat <<'TABLE'
no-fence               | failover/tell.rs   | let fence = self.fence_rail(peer, rail); | let fence = Fence::Fenced; _ = Self::fence_rail;
told-before-the-drain  | failover/tell.rs   | Fence::Pending => {} Fence::Unknown | Fence::Pending => { kept.fenced \|= 1 << rail; kept.tell_anew(); } Fence::Unknown
no-dedupe              | window.rs          | } else if ahead > cells.mask >> 1 { Ok(None) } | } else if ahead > cells.mask >> 1 { Ok(Some(0)) }
reply-not-kept         | failover/sent.rs   | failover.at(stream, seq).reply = value; | _ = (failover, seq, value);
reply-not-asked-for    | failover/tell.rs   | slot.ask = true; | slot.ask = false;
report-of-an-old-epoch | failover/tell.rs   | _ => { rails &= !bit; stale = true; } | _ => stale = true,
done-at-the-origin     | failover/tell.rs   | Some(false) if ours >> rail & 1 != 0 => slot.carried = Carried::Lost(rail), | Some(false) if ours >> rail & 1 != 0 => { slot.carried = match slot.what { Sent::Write { op, .. } if pending.slots[op as usize].posts == 0 => Carried::Arrived, _ => Carried::Lost(rail) } }
number-of-another      | failover/resume.rs | s.stamp \| seq.low(self.state.mask)) | s.stamp \| seq.plus(1).low(self.state.mask))
number-used-too-early  | failover/sent.rs   | return Seq(slot.end.0.wrapping_sub(1)); | return cursor;
read-before-the-fence  | failover/resume.rs | slot.posts == 0 && !fencing { | slot.posts == 0 { _ = fencing;
TABLE
}

export FISHPLATE_SEEDS=${FISHPLATE_SEEDS:-400}
under=core/src/engine suite=failover limit_s=600 # a minute without a failure
chosen=(run::every_operation --nocapture)
# The other tests run many schedules without a mutant.
first=(env FISHPLATE_SEEDS=40)
failure='^\(seed [0-9]*\) fails'
plant failover-mutants failover "$@"
