"""Errors of the plugin as a program sees them in stock NIXL."""

from agents import agent, leave
from nixl_cu12._bindings import nixlBackendError


def main():
    for wrong in {"speed": "high"}, {"fabric": "copper"}, {"device": "cuda:9999"}:
        try:
            agent("wrong", given=wrong)
        except nixlBackendError:
            continue
        raise AssertionError(f"{wrong} was accepted")


leave(main)
