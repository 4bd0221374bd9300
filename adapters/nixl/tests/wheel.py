"""Errors of the plugin as a program sees them in stock NIXL.

    wheel.py [--long]

--long: also deregisters memory of a transfer in flight, which NIXL refuses after 5 seconds. Needs
agents over tcp.
"""

import sys

from agents import Memory, agent, descs, finish, leave
from nixl_cu12._bindings import nixlBackendError, nixlNotAllowedError

SIZE = 32 << 20


def refused(error, call, *args, **named):
    try:
        call(*args, **named)
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def in_flight():
    here, there = agent("here"), agent("there")
    ours, theirs = Memory(here, SIZE), Memory(there, SIZE)
    here.add_remote_agent(there.get_agent_metadata())
    here.make_connection("there")
    pair = [descs(here, [(memory.at, SIZE)]) for memory in (ours, theirs)]
    handle = here.initialize_xfer("WRITE", *pair, "there", b"note")
    # The target makes no calls, so the transfer does not end.
    state = here.transfer(handle)
    assert state == "PROC", state
    refused(nixlNotAllowedError, here.deregister_memory, ours.registered)
    while state == "PROC":
        there.get_new_notifs()
        state = here.check_xfer_state(handle)
    finish(here, handle, state)
    ours.free()


def main():
    for wrong in {"speed": "high"}, {"fabric": "copper"}, {"device": "cuda:9999"}:
        refused(nixlBackendError, agent, "wrong", given=wrong)
    if "--long" in sys.argv:
        in_flight()


leave(main)
