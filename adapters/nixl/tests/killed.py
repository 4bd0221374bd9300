"""A killed peer fails only its own transfers, and can be started again.

    killed.py FOLDER ROUNDS [STARTER...]

Each round starts a process, moves data to and from it, kills it at a random moment, and waits for
NIXL_ERR_REMOTE_DISCONNECT. Transfers to another process continue meanwhile. The next process
notifies us while NIXL still holds the metadata of the killed process. Every second process has a
progress thread. STARTER is the command that starts each process. With MIXED in the environment, the
processes of even rounds start without STARTER. FISHPLATE_NIXL_KINDS, if it is set, is the kind of
memory: DRAM or VRAM.
"""

import os
import pickle
import random
import subprocess
import sys
import time

import numpy as np
from agents import Memory, agent, descs, exchange, finish, leave, until
from nixl_cu12._bindings import nixlRemoteDisconnectError

SIZE = 1 << 20
KIND = os.environ.get("FISHPLATE_NIXL_KINDS", "DRAM")


def peer(folder, name, round):
    """A peer that answers each notification, until it is killed."""
    made = agent(name, thread=round % 2 == 1)
    memory = Memory(made, SIZE, kind=KIND)
    memory.set(round % 251)
    mine = pickle.dumps((made.get_agent_metadata(), memory.at))
    theirs = exchange(folder, f"{name}{round}", [f"test-{name}{round}"], mine)
    made.add_remote_agent(theirs.popitem()[1])
    made.send_notif("test", f"hello {name} {round}".encode())
    while os.getppid() != 1:
        for sender, notes in made.get_new_notifs().items():
            for note in notes:
                made.send_notif(sender, note)


class Peer:
    def __init__(self, made, folder, name, round, starter, notes):
        self.made, self.name, self.round, self.notes = made, name, round, notes
        if "MIXED" in os.environ and round % 2 == 0:
            starter = []
        command = [*starter, sys.executable, __file__, folder, "peer", name, str(round)]
        self.process = subprocess.Popen(command)
        told = exchange(
            folder, f"test-{name}{round}", [f"{name}{round}"], made.get_agent_metadata()
        )
        metadata, self.at = pickle.loads(told.popitem()[1])
        self.expect(f"hello {name} {round}")
        if round:
            made.remove_remote_agent(name)
        made.add_remote_agent(metadata)
        self.memory = Memory(made, SIZE, kind=KIND)
        self.handles = []

    def expect(self, text):
        def there():
            for sender, found in self.made.get_new_notifs().items():
                self.notes.setdefault(sender, []).extend(note.decode() for note in found)
            return text in self.notes.get(self.name, [])

        until(f"{text} of {self.name}", there)
        self.notes[self.name].remove(text)

    def request(self, kind, rng, note=b""):
        count = rng.choice([1, 10, 100])
        ranges = [(at * 8192, rng.randrange(1, 8192)) for at in range(count)]
        ours = descs(self.made, [(self.memory.at + at, size) for at, size in ranges], KIND)
        theirs = descs(self.made, [(self.at + at, size) for at, size in ranges], KIND)
        handle = self.made.initialize_xfer(kind, ours, theirs, self.name, note)
        self.handles.append(handle)
        return handle, ranges

    def move(self, rng, number):
        handle, ranges = self.request("READ", rng)
        self.memory.set(255)
        finish(self.made, handle, self.made.transfer(handle))
        got = self.memory.get()
        for at, size in ranges:
            assert (got[at : at + size] == self.round % 251).all()
        self.memory.set(self.round % 251)
        text = f"number {self.round} {number}"
        handle, _ = self.request("WRITE", rng, text.encode())
        finish(self.made, handle, self.made.transfer(handle))
        self.expect(text)

    def end(self):
        for handle in self.handles:
            self.made.release_xfer_handle(handle)
        self.memory.free()


def main():
    folder, rounds, starter = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    seed = int(os.environ.get("FISHPLATE_SEED", random.randrange(1 << 30)))
    rng, made, notes = random.Random(seed), agent("test"), {}
    steady = Peer(made, folder, "steady", 0, starter, notes)
    seen = []
    for round in range(rounds):
        passing = Peer(made, folder, "passing", round, starter, notes)
        for number in range(rng.randrange(3)):
            passing.move(rng, number)
        handle, _ = passing.request(rng.choice(["READ", "WRITE"]), rng)
        idle, _ = passing.request("READ", rng)
        killed, dies = None, time.monotonic() + rng.random() * 0.02
        state, deadline = "DONE", time.monotonic() + 60
        try:
            while time.monotonic() < deadline:
                if killed is None and time.monotonic() >= dies:
                    passing.process.kill()
                    killed = time.monotonic()
                state = made.check_xfer_state(handle) if state == "PROC" else made.transfer(handle)
            raise TimeoutError("its end was not seen")
        except nixlRemoteDisconnectError:
            assert killed is not None, "it was alive"
            seen.append(time.monotonic() - killed)
        passing.process.wait()
        steady.move(rng, round)
        # The killed peer stays loaded. Later posts to it fail, and other peers are unaffected.
        for again in handle, idle:
            try:
                finish(made, again, made.transfer(again))
                raise AssertionError("posted to the dead")
            except nixlRemoteDisconnectError:
                pass
        steady.move(rng, rounds + round)
        passing.end()
    steady.end()
    steady.process.kill()
    print(
        f"{rounds} killed peers, seed {seed}, seen after {np.median(seen) * 1000:.1f} ms, "
        f"at most {max(seen) * 1000:.1f}"
    )


if sys.argv[2] == "peer":
    leave(lambda: peer(sys.argv[1], sys.argv[3], int(sys.argv[4])))
leave(main)
