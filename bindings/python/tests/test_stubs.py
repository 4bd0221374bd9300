"""Tests that the type stubs match the module, and that the examples match the stubs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="SKIPPED the stubs: mypy is missing")
FOLDER = Path(__file__).parent.parent


def check(*command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stubs_are_those_of_the_module(tmp_path):
    # The stubs declare `__buffer__`, which Python has only since 3.12. The module also has the
    # reflected operators that Python adds.
    allowed = tmp_path / "allowed"
    allowed.write_text(
        "fishplate._native.(Memory|Slice).__buffer__\nfishplate._native.Place.__radd__\n"
    )
    options = ["--allowlist", str(allowed), "--ignore-unused-allowlist", "--ignore-disjoint-bases"]
    check("mypy.stubtest", "fishplate", *options)


def test_the_examples_are_well_typed(tmp_path):
    examples = sorted(str(path) for path in (FOLDER / "examples").glob("*.py"))
    assert examples
    # Type-checking numpy itself takes minutes.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\n[mypy-numpy.*]\nfollow_imports = skip\n"
    )
    options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path)]
    check("mypy", *options, "--scripts-are-modules", *examples)
