"""Agents transfer random lists of ranges, and check every byte and every notification.

    transfers.py FOLDER NAME NAMES COUNT SEED

Runs one of several processes; NAMES lists all of them, separated by commas. Each process moves
COUNT lists, each to or from a random process, itself included. The processes exchange metadata
through files in FOLDER.

If the variable PULL is set, its shell command runs after a third of the lists, while one is in
flight. The command in PUT_BACK runs after two thirds.

FISHPLATE_NIXL_KINDS, if it is set, names the kinds of memory: DRAM, VRAM, or both with a comma
between them. Each list then moves between random kinds.

The variable RAILS may name network interfaces, separated by commas. Each process then also writes
long ranges to another process, until every interface carries a share.

A target checks the data of a write when its notification has arrived, and answers. So each
notification proves that its data arrived first.
"""

import os
import pickle
import random
import subprocess
import sys

import numpy as np
from agents import Memory, agent, descs, exchange, finish, leave, until

AREA = 1 << 20
CELL = 512


def pattern(seed, size):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def lists(seed):
    """Random disjoint ranges of one area, each with an equally long range of another area."""
    rng = random.Random(seed)
    cells = AREA // CELL
    count = rng.choice([1, 2, 5, 30, 300, 1000])
    if rng.random() < 0.2:
        # One long range.
        start, end = sorted(rng.sample(range(cells + 1), 2))
        return [(start * CELL, start * CELL, (end - start) * CELL)]
    here, there = rng.sample(range(cells), count), rng.sample(range(cells), count)
    if rng.random() < 0.3:
        # Adjacent ranges. The plugin joins them if they are adjacent at the other end too.
        first = rng.randrange(cells - count + 1)
        here, there = list(range(first, first + count)), list(range(cells - count, cells))
        rng.choice([lambda cells: None, rng.shuffle])(rng.choice([here, there]))
        return [(a * CELL, b * CELL, CELL) for a, b in zip(here, there)]
    found = []
    for a, b in zip(here, there):
        at = rng.randrange(CELL)
        found.append((a * CELL + at, b * CELL + at, rng.randrange(1, CELL - at + 1)))
    return found


def sent(rails):
    """Returns how many bytes each interface has sent."""
    with open("/proc/net/dev") as file:
        rows = dict(line.split(":") for line in file if ":" in line)
    found = {name.strip(): int(row.split()[8]) for name, row in rows.items()}
    return [found[rail] for rail in rails]


class Process:
    def __init__(self, folder, name, names, count, seed):
        self.name, self.names, self.count, self.seed = name, names, count, seed
        # Every second process has a progress thread.
        self.agent = agent(name, thread=names.index(name) % 2 == 1)
        kinds = os.environ.get("FISHPLATE_NIXL_KINDS", "DRAM").split(",")
        # Areas with one writer each, and one area that all processes read.
        offsets = range(0, len(names) * 3, 3)
        self.areas = {
            kind: [Memory(self.agent, AREA, at, kind) for at in offsets] for kind in kinds
        }
        self.books = {kind: Memory(self.agent, AREA, kind=kind) for kind in kinds}
        self.scratches = {kind: Memory(self.agent, AREA, kind=kind) for kind in kinds}
        for book in self.books.values():
            book.set(self.read_from(name))
        self.got = {other: [] for other in names}
        self.acks, self.done = set(), set()
        areas = {kind: [area.at for area in areas] for kind, areas in self.areas.items()}
        books = {kind: book.at for kind, book in self.books.items()}
        mine = (self.agent.get_agent_metadata(), areas, books)
        told = exchange(folder, name, names, pickle.dumps(mine))
        self.places = {}
        for other, bytes in told.items():
            metadata, areas, books = pickle.loads(bytes)
            if other != name:
                assert self.agent.add_remote_agent(metadata) == other.encode()
            mine = {kind: areas[kind][names.index(name)] for kind in kinds}
            self.places[other] = {"WRITE": mine, "READ": books}

    def read_from(self, name):
        return pattern([self.seed, self.names.index(name)], AREA)

    def serve(self):
        for sender, notes in self.agent.get_new_notifs().items():
            for note in notes:
                kind, number, seed, memory, _ = pickle.loads(note)
                if kind == "ack":
                    assert number not in self.acks, f"{sender} answered {number} twice"
                    self.acks.add(number)
                elif kind == "done":
                    self.done.add(sender)
                else:
                    self.got[sender].append(number)
                    if kind == "write":
                        self.check(sender, seed, memory)
                    self.agent.send_notif(sender, pickle.dumps(("ack", number, 0, "", b"")))

    def check(self, sender, seed, memory):
        area = self.areas[memory][self.names.index(sender)].get()
        data = pattern(seed, AREA)
        for here, there, size in lists(seed):
            assert (
                area[there : there + size] == data[here : here + size]
            ).all(), f"{sender}: {there}, {size}"

    def move(self, number):
        rng = random.Random(f"{self.seed} {self.name} {number}")
        target, seed = rng.choice(self.names), rng.getrandbits(40)
        write, pieces = rng.random() < 0.6, lists(seed)
        kind = "WRITE" if write else "READ"
        near, far = [rng.choice(list(self.books)) for _ in range(2)]
        start, scratch = self.places[target][kind][far], self.scratches[near]
        padding = bytes(rng.choice([0, 10, 1000, 5000]) if rng.random() < 0.98 else 300_000)
        note = pickle.dumps((kind.lower(), number, seed, far, padding))
        scratch.set(pattern(seed, AREA) if write else 0)
        ours = descs(self.agent, [(scratch.at + here, size) for here, _, size in pieces], near)
        theirs = descs(self.agent, [(start + there, size) for _, there, size in pieces], far)
        handle = self.agent.initialize_xfer(kind, ours, theirs, target, note)
        state = self.agent.transfer(handle)
        for variable, when in ("PULL", self.count // 3), ("PUT_BACK", self.count * 2 // 3):
            if number == when and variable in os.environ:
                subprocess.run(os.environ[variable], shell=True, check=True)
        finish(self.agent, handle, state)
        if not write:
            want, data = np.zeros(AREA, np.uint8), self.read_from(target)
            for here, there, size in pieces:
                want[here : here + size] = data[there : there + size]
            assert (scratch.get() == want).all(), f"read {number} from {target}, {far} to {near}"
        self.agent.release_xfer_handle(handle)
        until(f"the answer of {target} to {number}", lambda: number in self.acks, self.serve)
        return target

    def run(self):
        sent = {name: [] for name in self.names}
        for number in range(self.count):
            sent[self.move(number)].append(number)
            self.serve()
        self.write_long()
        for name in self.names:
            self.agent.send_notif(name, pickle.dumps(("done", 0, 0, "", b"")))
        until("the others to be done", lambda: self.done == set(self.names), self.serve)
        # Notification numbers rise without duplicates. All notifications were answered.
        for name, numbers in self.got.items():
            assert numbers == sorted(set(numbers)), f"notifications of {name}"
        assert self.got[self.name] == sent[self.name]
        return sum(map(len, self.got.values()))


    def write_long(self):
        """Writes long ranges until each interface carries a share. The shares may be wrong at
        first: they were measured with few bytes in flight to a target that seldom made progress."""
        rails = [rail for rail in os.environ.get("RAILS", "").split(",") if rail]
        other = next(name for name in self.names if name != self.name)
        seen = []
        while rails and len(seen) < 4:
            before = sent(rails)
            for _ in range(64):
                ours, theirs = (
                    descs(self.agent, [(at, AREA)])
                    for at in (self.scratches["DRAM"].at, self.places[other]["WRITE"]["DRAM"])
                )
                handle = self.agent.initialize_xfer("WRITE", ours, theirs, other)
                finish(self.agent, handle, self.agent.transfer(handle))
                self.agent.release_xfer_handle(handle)
            self.serve()
            seen.append([now - then for now, then in zip(sent(rails), before)])
            if all(bytes > sum(seen[-1]) / 10 for bytes in seen[-1]):
                return
        assert not rails, f"{rails} sent {seen} bytes"


def main():
    folder, name, names, count, seed = sys.argv[1:]
    process = Process(folder, name, names.split(","), int(count), int(seed))
    notified = process.run()
    print(f"{name}: moved {count} lists, seed {seed}, and was notified {notified} times")


leave(main)
