"""Times transfers between agents of stock NIXL in two processes.

    nixl-pair.py BACKEND [NAME=VALUE...]

With MEMORY=VRAM in the environment, the data is in memory of the first CUDA device.

Prints a line of JSON for each case. The values are medians: microseconds from the post to its
completion; microseconds from the post until the target has answered its notification; processor
time per descriptor.
"""

import ctypes
import json
import os
import signal
import statistics
import sys
import time

os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")

sys.path.append(os.path.join(os.path.dirname(__file__), "../adapters/nixl/tests"))

import device
import numpy as np
from agents import nixl_agent, nixl_agent_config

# Name, bytes per descriptor, number of descriptors, number of timed transfers.
CASES = [
    ("4 KiB", 4096, 1, 400),
    ("64 KiB", 65536, 1, 200),
    ("1 MiB", 1 << 20, 1, 60),
    ("64 MiB", 1 << 26, 1, 6),
    ("1000 x 4 KiB", 4096, 1000, 25),
]
SIZE = 1 << 26
HUGE = 2 << 20
MEMORY = os.environ.get("MEMORY", "DRAM")


def open_agent(name, cpu):
    os.sched_setaffinity(0, {cpu})
    if MEMORY == "VRAM":
        memory = device.Memory(SIZE)
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(sys.argv[1], dict(pair.split("=", 1) for pair in sys.argv[2:]))
    if MEMORY == "VRAM":
        agent.register_memory([(memory.at, SIZE, 0, "")], MEMORY)
        return agent, memory, memory.at
    # Starts on a huge page. Otherwise the address, which differs between backends, decides which of
    # the short transfers use pages of 4 KiB.
    memory = np.ones(SIZE + HUGE, np.uint8)
    memory = memory[-memory.ctypes.data % HUGE :][:SIZE]
    agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], MEMORY)
    return agent, memory, memory.ctypes.data


def target(told, heard, cpu):
    agent, memory, at = open_agent("target", cpu)
    told.write(json.dumps([agent.get_agent_metadata().hex(), at]) + "\n")
    told.flush()
    agent.add_remote_agent(bytes.fromhex(heard.readline().strip()))
    while True:
        for sender, notes in agent.get_new_notifs().items():
            for note in notes:
                if note == b"end":
                    os._exit(0)
                agent.send_notif(sender, note)


def ranges(agent, at, size, count):
    table = np.zeros((count, 3), np.uint64)
    # Uses every second piece, so that no two pieces are adjacent and can be merged.
    table[:, 0], table[:, 1] = at + np.arange(count) * 2 * size, size
    return agent.get_xfer_descs(table, MEMORY)


def main():
    allowed = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2] * 2))
    cpus = [int(cpu) for cpu in os.environ.get("CPUS", allowed).split(",")]
    there, ours = os.pipe()
    here, theirs = os.pipe()
    if os.fork() == 0:
        # PR_SET_PDEATHSIG: the kernel kills this process when its parent exits.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        target(os.fdopen(theirs, "w"), os.fdopen(there), cpus[1])
    told, heard = os.fdopen(ours, "w"), os.fdopen(here)
    agent, memory, at = open_agent("initiator", cpus[0])
    metadata, address = json.loads(heard.readline())
    told.write(agent.get_agent_metadata().hex() + "\n")
    told.flush()
    began = time.perf_counter()
    agent.add_remote_agent(bytes.fromhex(metadata))

    def answered():
        while not (notes := agent.get_new_notifs()):
            pass
        assert notes == {"target": [b"note"]}, notes

    def done(handle, state):
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state

    agent.send_notif("target", b"note")
    answered()
    print(json.dumps({"case": "load and connect", "us": (time.perf_counter() - began) * 1e6}))
    for case, size, count, times in CASES:
        local = ranges(agent, at, size, count)
        remote = ranges(agent, address, size, count)
        for kind in "WRITE", "READ":
            handle = agent.initialize_xfer(kind, local, remote, "target", b"note")
            took = {"done": [], "ack": []}
            processor = time.process_time()
            for number in range(times + times // 5 + 2):
                start = time.perf_counter()
                done(handle, agent.transfer(handle))
                middle = time.perf_counter()
                answered()
                took["done"].append(middle - start)
                took["ack"].append(time.perf_counter() - start)
            processor = (time.process_time() - processor) / (times + times // 5 + 2) / count
            for what, found in took.items():
                value = statistics.median(found[-times:]) * 1e6
                print(json.dumps({"case": f"{case}, {kind}, {what}", "us": value}))
            print(
                json.dumps(
                    {"case": f"{case}, {kind}, processor per descriptor", "us": processor * 1e6}
                )
            )
            agent.release_xfer_handle(handle)
    agent.send_notif("target", b"end")
    sys.stdout.flush()
    # Skips exit handlers, because the wheel's UCX crashes in them.
    os._exit(0)


main()
