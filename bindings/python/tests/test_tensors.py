"""DLPack in both directions, torch if it is installed, and direct sends into exported tensors."""

import gc
import xml.etree.ElementTree as xml

import numpy
import pytest
from conftest import SOON, run

import fishplate
from fishplate import plot, sweep
from fishplate.direct import Inlet, Outlet


class Tensor:
    """An array with DLPack but without the buffer protocol, like a torch tensor."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device
        self.nbytes = array.nbytes

    def __dlpack__(self):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def test_tensors_are_buffers_of_all_calls(own):
    words = numpy.arange(8, dtype=numpy.uint64)
    own.node.put(Tensor(words), own.theirs.at(8))
    own.node.quiet()
    assert own.memory.read(8, 64) == words.tobytes()
    into = numpy.zeros((2, 4), numpy.uint64)
    own.node.get(Tensor(into), own.theirs.at(8))
    assert into.tobytes() == words.tobytes()
    own.node.send(own.peer, 1, Tensor(words))
    into[:] = 0
    own.node.recv(Tensor(into), tag=1)
    assert into.tobytes() == words.tobytes()
    with own.node.register(Tensor(numpy.zeros(8, numpy.uint64))) as lent:
        assert len(lent) == 64


def test_a_tensor_in_flight_is_held_and_given_back(own):
    array = numpy.zeros(1 << 12, numpy.uint64)
    references = []
    array = array.view(
        type("Watched", (numpy.ndarray,), {"__del__": lambda self: references.append(1)})
    )
    request = own.node.irecv(Tensor(array), own.peer, 1)
    del array
    gc.collect()
    held = len(references)
    own.node.send(own.peer, 1, b"x" * 100)
    request.wait()
    del request
    own.node.poll()
    gc.collect()
    assert held == 0 and references


@pytest.mark.parametrize(
    "array", [numpy.zeros((4, 4))[:, :2], numpy.zeros(8)[::2], numpy.zeros((2, 3)).T]
)
def test_tensors_that_are_not_contiguous_are_refused(own, array):
    with pytest.raises(BufferError, match="not contiguous"):
        own.node.put(Tensor(array), own.theirs)


def test_tensors_with_extents_of_0_and_1_are_contiguous(own):
    own.node.put(Tensor(numpy.zeros((0, 3))), own.theirs)
    own.node.put(Tensor(numpy.zeros((4, 1))[:, :1]), own.theirs)


def test_wrong_tensors_are_refused(own):
    with pytest.raises(BufferError, match="neither CUDA nor ROCm"):
        own.node.put(Tensor(numpy.zeros(8), (7, 0)), own.theirs)

    class Wrong(Tensor):
        def __dlpack__(self):
            return 7

    with pytest.raises(ValueError):
        own.node.put(Wrong(numpy.zeros(8)), own.theirs)
    taken = numpy.zeros(8).__dlpack__()

    class Twice(Tensor):
        def __dlpack__(self):
            return taken

    own.node.put(Twice(numpy.zeros(8)), own.theirs)
    with pytest.raises(ValueError):
        own.node.put(Twice(numpy.zeros(8)), own.theirs)


def test_memory_is_a_tensor_of_bytes(own):
    bytes_ = numpy.from_dlpack(own.memory)
    assert bytes_.dtype == numpy.uint8 and bytes_.shape == (4096,)
    own.node.put_signal(b"\x07" * 8, own.theirs.at(16), own.theirs)
    own.node.wait(own.memory, "==", 1)
    assert bytes_[0] == 1 and bytes_[16] == 7
    part = numpy.from_dlpack(own.memory.at(16, 8))
    assert part.shape == (8,) and part.sum() == 56
    own.memory.__dlpack__(), own.memory.__dlpack__(stream=None, max_version=(1, 0))
    own.theirs.release()
    own.memory.free()
    own.node.close()
    gc.collect()
    assert part.sum() == 56
    with pytest.raises(BufferError):
        numpy.from_dlpack(own.memory)


def test_a_tensor_keeps_its_bytes():
    node = fishplate.Node(fabric="off")
    memory = node.alloc(1 << 20)
    memory.write(b"kept")
    kept, part = numpy.from_dlpack(memory), numpy.from_dlpack(memory[:4])
    memory.free()
    node.close()
    del memory, node
    gc.collect()
    assert bytes(kept[:4]) == bytes(part) == b"kept"


def test_torch_tensors(own):
    torch = pytest.importorskip("torch", reason="SKIPPED tensors of torch: it is missing")
    tensor = torch.arange(8, dtype=torch.float32)
    own.node.put_signal(tensor, own.theirs.at(64), own.theirs)
    own.node.wait(own.memory, "==", 1)
    ours = torch.from_dlpack(own.memory.at(64, 32)).view(torch.float32)
    assert torch.equal(ours, tensor)
    ours[0] = 5
    assert numpy.frombuffer(own.memory.at(64, 4), numpy.float32)[0] == 5
    into = torch.zeros(8)
    own.node.get(into, own.theirs.at(64))
    assert into[0] == 5 and into[7] == 7
    with pytest.raises(BufferError):
        own.node.put(torch.zeros(4, 4)[:, :2], own.theirs)
    with pytest.raises((BufferError, RuntimeError)):
        own.node.put(torch.zeros(4, requires_grad=True), own.theirs)


def directly(here, wide):
    """Rank 0 writes into a tensor of rank 1. Rank 1 reads the tensor and releases it to rank 0."""
    node, peer = here.node, here.peers[1 - here.rank]
    if here.rank == 0:
        outlet = Outlet(node, peer, channel=7)
        assert outlet.size == 8 * wide
        for turn in range(1, 51):
            data = numpy.full(wide, turn, numpy.uint64)
            if turn % 2:
                outlet.send_direct(data)
            else:
                outlet.isend_direct(Tensor(data)).wait()
        with pytest.raises(fishplate.Misuse):
            outlet.send_direct(bytes(8 * wide + 1))
        # The receiver has not called `notify` after its last wait.
        with pytest.raises(fishplate.Timeout):
            outlet.close(timeout=0.1)
        here.job.barrier(node)
        outlet.close()
        here.job.barrier(node)
    else:
        words = numpy.zeros(wide, numpy.uint64)
        inlet = Inlet(node, peer, words, channel=7)
        for turn in range(1, 51):
            inlet.wait()
            assert (words == turn).all()
            if turn < 50:
                inlet.notify()
        here.job.barrier(node)
        inlet.notify()
        here.job.barrier(node)
        inlet.close()


@pytest.mark.parametrize("wide", [8, 1 << 16])
def test_direct_sends(way, wide):
    run(2, directly, way, wide)


def both_ways(here):
    """Each process makes both ends of channel 0, in the other order."""
    peer, ends = here.peers[1 - here.rank], {}
    inbox = here.node.alloc(8)
    if here.rank == 0:
        ends["in"] = Inlet(here.node, peer, inbox)
    outlet = Outlet(here.node, peer)
    inlet = ends.get("in") or Inlet(here.node, peer, inbox)
    for turn in range(1, 4):
        outlet.send_direct(bytes([here.rank, turn]))
        inlet.wait()
        assert inbox.read(0, 2) == bytes([1 - here.rank, turn])
        inlet.notify()
    outlet.close()
    here.job.barrier(here.node)
    inlet.close()


def test_direct_sends_go_both_ways_on_one_channel(way):
    run(2, both_ways, way)


def test_a_direct_send_that_is_refused_sends_nothing(own):
    node, words = own.node, numpy.zeros(8, numpy.uint64)
    inlet = Inlet(node, own.peer, words)
    outlet = Outlet(node, own.peer)
    for data, error in [
        (numpy.ones((4, 4), numpy.uint32)[:, ::2], ValueError),
        (bytes(65), fishplate.Misuse),
        ("text", TypeError),
    ]:
        with pytest.raises(error):
            outlet.send_direct(data, timeout=0)
    for turn in (1, 2):
        outlet.send_direct(numpy.full(8, turn, "M8[s]"), timeout=SOON)
        inlet.wait(0)
        assert (words == turn).all()
        inlet.notify()
    # Both ends have imports of this process, so neither can free its memory first.
    with pytest.raises(fishplate.InUse):
        outlet.close()
    inlet.close()
    outlet.close()


def test_a_direct_send_is_ordered_behind_one_that_failed_before_its_signal(own):
    inlet = Inlet(own.node, own.peer, own.node.alloc(64))
    outlet, calls = Outlet(own.node, own.peer), []

    class Interrupted:
        """Delegates to the node. The first signal fails."""

        def __getattr__(self, name):
            calls.append(name)
            if calls.count("signal") == 1 and name == "signal":
                raise KeyboardInterrupt
            return getattr(own.node, name)

    outlet._node = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        outlet.isend_direct(bytes(64))
    for _ in range(2):
        outlet.send_direct(bytes(64), timeout=SOON)
        inlet.wait(0)
        inlet.notify()
    send = ["wait", "iput", "signal"]
    assert calls == send + ["wait", "fence", "iput", "signal"] + send


def test_a_closed_inlet_does_not_wait_for_another_channel(own):
    memory = own.node.alloc(64)
    inlet, outlet = Inlet(own.node, own.peer, memory), Outlet(own.node, own.peer)
    outlet.send_direct(bytes(64), timeout=SOON)
    inlet.wait(0)
    inlet.notify()
    # Both ends use one node, so neither can free its word first.
    with pytest.raises(fishplate.InUse):
        inlet.close()
    with pytest.raises(fishplate.Misuse):
        inlet.notify()
    outlet.close()
    inlet.close()


def sweeps(here, place):
    sweep.main([place, "--sizes", "8,64K", "-n", "30", "--check"])


@pytest.mark.parametrize("sizes", ["0", "8,0", "-5", "", "x", "8K8"])
def test_a_sweep_refuses_sizes_that_are_none(sizes, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main([f"--sizes={sizes}"])
    assert ended.value.code == 2 and "--sizes" in capsys.readouterr().err


def test_a_sweep_is_drawn(tmp_path, capfd):
    from conftest import free_address

    run(2, sweeps, "shm", free_address())
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 4
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join(lines))
    plot.main([str(file)])
    picture = xml.parse(file.with_suffix(".svg")).getroot()
    assert len(picture.findall("{*}polyline")) == 4
    file.write_text("{}")
    with pytest.raises(SystemExit, match="line 1"):
        plot.main([str(file)])


def test_the_bar_counts_steps(capsys):
    bar = sweep.Bar(4, shown=True)
    for size in range(4):
        bar.step(f"direct {size}")
    bar.close()
    told = capsys.readouterr().err
    assert "direct 3 [" in told and "3/4" in told and told.endswith("\r")
