"""Helpers of the plugin's tests: agents of stock NIXL, and the memory that they register."""

import ctypes
import os
import sys
import time
import traceback

os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")

import device
import numpy as np

try:
    from nixl_cu12._api import nixl_agent, nixl_agent_config
except ImportError:
    from nixl_cu13._api import nixl_agent, nixl_agent_config

# Generous, because the test may share its processors with many other programs.
PATIENCE = 60


def params():
    """Returns the backend's parameters: the NAME=VALUE pairs in FISHPLATE_NIXL_PARAMS."""
    return dict(pair.split("=", 1) for pair in os.environ.get("FISHPLATE_NIXL_PARAMS", "").split())


def agent(name, thread=False, given=None, config=None):
    made = nixl_agent(name, config or nixl_agent_config(enable_prog_thread=thread, backends=[]))
    assert "FISHPLATE" in made.get_plugin_list(), made.get_plugin_list()
    made.create_backend("FISHPLATE", params() if given is None else given)
    return made


class Memory:
    """Bytes that an agent has registered."""

    def __init__(self, owner, size, offset=0, kind="DRAM"):
        self.place = device.Memory(size + offset) if kind == "VRAM" else None
        self.bytes = np.zeros(size + offset, np.uint8)[offset:]
        self.at = self.place.at + offset if self.place else self.bytes.ctypes.data
        self.owner, self.offset = owner, offset
        self.set(0)
        self.registered = owner.register_memory([(self.at, size, 0, "")], kind)

    def set(self, bytes):
        """Writes all bytes."""
        self.bytes[:] = bytes
        if self.place:
            self.place.write(self.offset, self.bytes)

    def get(self):
        """Returns all bytes."""
        if self.place:
            self.place.read(self.offset, self.bytes)
        return self.bytes

    def free(self):
        self.owner.deregister_memory(self.registered)
        if self.place:
            self.place.free()


def until(what, holds, passing=lambda: None):
    """Waits until `holds` returns true. Calls `passing` between the checks."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        passing()
        if time.monotonic() > deadline:
            raise TimeoutError(what)


def descs(of, ranges, kind="DRAM"):
    """Returns descriptors of the ranges, each (address, length)."""
    table = np.zeros((len(ranges), 3), np.uint64)
    table[:, :2] = ranges
    return of.get_xfer_descs(table, kind)


def finish(of, handle, state):
    """Waits until a posted transfer has completed."""
    deadline = time.monotonic() + PATIENCE
    while state == "PROC":
        state = of.check_xfer_state(handle)
        if time.monotonic() > deadline:
            raise TimeoutError("a transfer")
    assert state == "DONE", state


def exchange(folder, name, names, mine):
    """Exchanges bytes with other processes through files."""
    path = os.path.join(folder, name)
    with open(path + ".new", "wb") as file:
        file.write(mine)
    os.rename(path + ".new", path)
    found = {}
    for other in names:
        theirs = os.path.join(folder, other)
        until(f"the file of {other}", lambda: os.path.exists(theirs), lambda: time.sleep(0.005))
        with open(theirs, "rb") as file:
            found[other] = file.read()
    return found


def leave(run):
    """Runs a test, then exits without exit handlers, because the wheel's UCX crashes in them."""
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    if "FAKE_CUDA_REPORT" in os.environ:
        # The fake driver reports in an exit handler.
        ctypes.CDLL(None).exit(status)
    os._exit(status)
