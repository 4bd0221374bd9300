"""Device memory: tensors of other libraries by DLPack and `__cuda_array_interface__`, and memory of
the node's device. Runs with a CUDA driver (or tests/fake-cuda), and with host memory in place
of a device. Tests that need a driver are skipped without it."""

import ctypes
import gc
import mmap
import weakref

import numpy
import pytest
from conftest import GPUS, SOON, run, why_not

import fishplate


class Cuda:
    """Allocates memory of the first device through its driver."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1" if find("libcuda.so.1") else "libcuda.so")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        # The driver of tests/fake-cuda copies only between pinned memory and its own memory.
        self.pages = mmap.mmap(-1, 1 << 20)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.pinned = numpy.frombuffer(self.pages, numpy.uint8)
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(start), ctypes.c_size_t(1 << 20), 2)
        at = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(at), ctypes.c_void_p(start), 0)
        self.pinned_at = at.value
        weakref.finalize(self, self.driver.cuMemHostUnregister, ctypes.c_void_p(start))

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def alloc(self, size, device=0):
        at, context = ctypes.c_uint64(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        return at.value

    def copy(self, to, source, size):
        arguments = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), None)
        self.call("cuMemcpyAsync", *arguments)
        self.call("cuStreamSynchronize", None)

    def write(self, to, array):
        self.pinned[: array.nbytes] = numpy.frombuffer(array, numpy.uint8)
        self.copy(to, self.pinned_at, array.nbytes)

    def read(self, source, size):
        self.copy(self.pinned_at, source, size)
        return self.pinned[:size].tobytes()


def find(name):
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


class Array:
    """An array in device memory with `__cuda_array_interface__` but without DLPack."""

    def __init__(self, cuda, array, **changed):
        self.cuda, self.shape, self.kind = cuda, array.shape, array.dtype.str
        self.nbytes, self.changed = array.nbytes, changed
        # An offset makes the array begin inside its allocation.
        self.base = cuda.alloc(array.nbytes + 64, changed.pop("device", 0))
        self.at = self.base + changed.pop("offset", 0)
        self.fill(array)

    def fill(self, array):
        self.cuda.write(self.at, array)

    def seen(self):
        return numpy.frombuffer(self.cuda.read(self.at, self.nbytes), self.kind).reshape(self.shape)

    def __del__(self):
        self.cuda.driver.cuMemFree_v2(ctypes.c_uint64(self.base))

    @property
    def __cuda_array_interface__(self):
        data, shape, typestr = (self.at, False), self.shape, self.kind
        return {"data": data, "shape": shape, "typestr": typestr, "version": 3} | self.changed


class Plain(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


class Tensor:
    """An array in device memory with DLPack but without `__cuda_array_interface__`."""

    device = (2, 0)

    def __init__(self, *arguments, **changed):
        self.array = Array(*arguments, **changed)
        self.fill, self.seen, self.nbytes = self.array.fill, self.array.seen, self.array.nbytes
        self.lent, self.kept = 0, []

    def back(self, _):
        self.lent -= 1

    def __dlpack__(self, stream=None):
        assert stream == -1
        plain = Plain()
        plain.data, plain.dimensions, plain.bits, plain.lanes = self.array.at, 1, 8, 1
        plain.device[:] = self.device
        length = ctypes.c_int64(self.nbytes)
        plain.shape, plain.deleter = ctypes.pointer(length), Plain._fields_[-1][1](self.back)
        self.kept.append((plain, length))
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_void_p,
        ]
        self.lent += 1
        return capsule(ctypes.addressof(plain), b"dltensor", None)

    def __dlpack_device__(self):
        return self.device


@pytest.fixture(params=GPUS)
def gpu(request):
    if reason := why_not(request.param):
        pytest.skip(f"SKIPPED device memory, {request.param}: {reason}")
    return request.param


@pytest.fixture
def cuda():
    if reason := why_not("cuda"):
        pytest.skip(f"SKIPPED device memory, cuda: {reason}")
    return Cuda()


@pytest.fixture
def here(cuda):
    with fishplate.Node(timeout=SOON, **GPUS["cuda"]) as node:
        yield node


def pattern(seed, size):
    return numpy.random.default_rng(seed).integers(0, 256, size, numpy.uint8)


SIZES = [1, 8, 1000, 4097, 300_000]


def between(here):
    """Each process moves device memory to and from the other process, with every call."""
    node, peer, other = here.node, here.peers[1 - here.rank], 1 - here.rank
    device, source, words = node.alloc_device(1 << 19), node.alloc_device(1 << 19), node.alloc(4096)
    theirs = peer.import_memory(here.job.exchange(device.handle()))
    their_words = peer.import_memory(here.job.exchange(words.handle()))
    for turn, size in enumerate(SIZES, 1):
        source.write(pattern(here.rank + turn, size))
        node.put_signal(source.at(0, size), theirs, their_words, turn)
        node.wait(words, "==", turn, peer)
        assert device.read(0, size) == pattern(other + turn, size).tobytes()
        into = bytearray(size)
        node.get(into, theirs)
        assert into == pattern(here.rank + turn, size).tobytes()
        here.job.barrier(node)
        node.iput(pattern(turn, size), theirs).wait()
        here.job.barrier(node)
        assert device.read(0, size) == pattern(turn, size).tobytes()
        request = node.isend(peer, 1, source.at(0, size))
        assert node.irecv(device.at(0, size), peer, 1).wait().len == size
        request.wait()
        assert device.read(0, size) == pattern(other + turn, size).tobytes()
        here.job.barrier(node)
    # Waits for a word in device memory.
    device.write(bytes(8))
    here.job.barrier(node)
    node.put_signal(source.at(0, 8), theirs.at(64), theirs, 7)
    assert node.wait(device, "==", 7, peer) == 7
    with pytest.raises(fishplate.Misuse) as refused:
        node.put(b"12345678", theirs)
    assert refused.value.kind == "device_memory"
    here.job.barrier(node)
    return node.gpu_stats()


def test_memory_of_the_device_is_put_got_and_sent(gpu):
    for stats in run(2, between, gpu):
        assert sum(stats.values()) > 0


def tensors(here, kind):
    """Each process moves its own device arrays, registered and unregistered, with every call."""
    node, peer, other, cuda = here.node, here.peers[1 - here.rank], 1 - here.rank, Cuda()
    kind = {"array": Array, "tensor": Tensor}[kind]
    into = kind(cuda, numpy.zeros(1 << 19, numpy.uint8))
    inbox, words = node.register(into), node.alloc(4096)
    theirs = peer.import_memory(here.job.exchange(inbox.handle()))
    their_words = peer.import_memory(here.job.exchange(words.handle()))
    for turn, size in enumerate(SIZES, 1):
        # Unregistered memory may begin at any address.
        source = kind(cuda, pattern(here.rank + turn, size), offset=turn % 8)
        node.put_signal(source, theirs, their_words, turn)
        node.wait(words, "==", turn, peer)
        assert (into.seen()[:size] == pattern(other + turn, size)).all()
        node.quiet(peer)
        source.fill(numpy.zeros(size, numpy.uint8))
        got = kind(cuda, numpy.zeros(size, numpy.uint8), offset=turn % 8)
        node.get(got, theirs)
        assert (got.seen() == pattern(here.rank + turn, size)).all()
        here.job.barrier(node)
        node.send(peer, turn, got)
        message = node.recv(source, peer, turn)
        assert message.len == size and (source.seen() == pattern(other + turn, size)).all()
        request = node.isend(peer, turn, source)
        assert node.irecv(got, peer, turn).wait().len == size
        request.wait()
        assert (got.seen() == pattern(here.rank + turn, size)).all()
        here.job.barrier(node)
    node.quiet()
    if kind is Tensor:
        assert (source.lent, got.lent, into.lent) == (0, 0, 1)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_tensors_on_the_device_are_buffers_of_all_calls(cuda, kind):
    run(2, tensors, "cuda", kind)


def test_memory_of_the_device_is_a_tensor(gpu):
    node = fishplate.Node(timeout=SOON, **GPUS[gpu])
    memory = node.alloc_device(4096)
    memory.write(b"abc", 16)
    with pytest.raises(BufferError, match="on a device"):
        memoryview(memory)
    if gpu == "cuda":
        assert memory.__dlpack_device__() == memory[16:].__dlpack_device__() == (2, 0)
        array, part = memory.__cuda_array_interface__, memory.at(16, 3).__cuda_array_interface__
        assert array["shape"] == (4096,) and part["shape"] == (3,) and array["typestr"] == "|u1"
        assert part["data"] == (array["data"][0] + 16, False) and array["version"] == 3
        assert Cuda().read(part["data"][0], 3) == b"abc"
        lent = memory.__dlpack__(stream=None, max_version=(1, 0))
    else:
        assert memory.__dlpack_device__() == (1, 0) and not hasattr(
            memory, "__cuda_array_interface__"
        )
        lent = numpy.from_dlpack(memory.at(16, 3))
        assert bytes(lent) == b"abc"
    with pytest.raises(fishplate.InUse):
        memory.free()
    del lent
    gc.collect()
    memory.free()
    with pytest.raises(BufferError):
        memory.__dlpack__()
    # A tensor outlives its node.
    kept = node.alloc_device(64)
    kept.write(b"kept")
    lent = kept.__dlpack__() if gpu == "cuda" else numpy.from_dlpack(kept)
    node.close()
    del node
    gc.collect()
    assert gpu == "cuda" or bytes(lent[:4]) == b"kept"
    with pytest.raises(BufferError):
        kept.__dlpack__()


def test_memory_of_the_host_is_no_cuda_array(own):
    assert not hasattr(own.memory, "__cuda_array_interface__")
    assert not hasattr(own.memory[:8], "__cuda_array_interface__")
    assert own.node.gpu_stats() is None
    with pytest.raises(fishplate.Misuse) as refused:
        own.node.alloc_device(8)
    assert refused.value.kind == "no_device" and "gpu=" in str(refused.value)
    with pytest.raises(fishplate.Misuse) as refused:
        own.node.defer_device_frees(True)
    assert refused.value.kind == "no_device"


class Pointer:
    def __init__(self, **changed):
        self.__cuda_array_interface__ = {
            "data": (0x7000_0000_0000, False), "shape": (64,), "typestr": "|u1", "version": 3
        } | changed


def test_device_memory_needs_a_device(own):
    for call in (
        own.node.register,
        lambda array: own.node.put(array, own.theirs),
        lambda array: own.node.send(own.peer, 1, array),
        lambda array: own.node.isend(own.peer, 1, array),
    ):
        # No allocation can be as long as the second array.
        for array in (Pointer(), Pointer(shape=(1 << 50,))):
            with pytest.raises(fishplate.Misuse) as refused:
                call(array)
            assert refused.value.kind == "no_device"
    with pytest.raises(BufferError, match="device memory"):
        own.memory.write(Pointer())
    own.node.put(Pointer(data=(0, False), shape=(0, 3)), own.theirs)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"data": (0, False)}, "no address"),
        ({"typestr": "|t1"}, "unknown type"),
        ({"typestr": ""}, "unknown type"),
        ({"typestr": "é"}, "unknown type"),
        ({"strides": (2,)}, "not contiguous"),
        ({"shape": (1 << 40, 1 << 40)}, "exceeds the address space"),
        ({"mask": 1}, "masked"),
        ({"data": (8, True)}, "read-only"),
    ],
)
def test_wrong_arrays_are_refused(own, changed, told):
    with pytest.raises(BufferError, match=told):
        own.node.register(Pointer(**changed))


def test_arrays_that_break_the_protocol_are_refused(own):
    for changed in ({"data": 7}, {"shape": (-1,)}, {"strides": 3}):
        with pytest.raises((TypeError, OverflowError)):
            own.node.register(Pointer(**changed))
    array = Pointer()
    del array.__cuda_array_interface__["shape"]
    with pytest.raises(BufferError, match="no \"shape\""):
        own.node.register(array)
    array.__cuda_array_interface__ = 7
    with pytest.raises(TypeError):
        own.node.register(array)


def test_memory_that_no_driver_knows_is_refused(gpu):
    with fishplate.Node(**GPUS[gpu]) as node:
        peer = node.connect(node.address)
        for call in (node.register, lambda array: node.isend(peer, 1, array)):
            for array in (Pointer(), Pointer(shape=(1 << 46,))):
                with pytest.raises(fishplate.Error) as refused:
                    call(array)
                assert refused.value.kind == "device"


def test_frees_of_device_memory_can_be_deferred(gpu):
    with fishplate.Node(**GPUS[gpu]) as node:
        node.defer_device_frees(True)
        node.alloc_device(64).free()
        node.poll()
        node.defer_device_frees(False)


def test_tensors_of_other_devices_are_refused(here, cuda):
    tensor = Tensor(cuda, numpy.zeros(64, numpy.uint8))
    for tensor.device, name in (((2, 1), "cuda:1"), ((10, 0), "hip:0")):
        with pytest.raises(fishplate.Misuse) as refused:
            here.register(tensor)
        assert (
            refused.value.kind == "device_memory"
            and name in str(refused.value)
            and tensor.lent == 0
        )
    array = Array(cuda, numpy.zeros(64, numpy.uint8), device=1)
    with pytest.raises(fishplate.Misuse) as refused:
        here.register(array)
    assert refused.value.kind == "device_memory"
    assert "cuda:1" in str(refused.value) and "cuda:0" in str(refused.value)
    misaligned = Tensor(cuda, numpy.zeros(64, numpy.uint8), offset=4)
    with pytest.raises(fishplate.Misuse) as refused:
        here.register(misaligned)
    assert refused.value.kind == "misaligned" and misaligned.lent == 0


def test_a_tensor_in_flight_is_held(here, cuda):
    peer = here.connect(here.address)
    tensor = Tensor(cuda, numpy.zeros(64, numpy.uint8))
    request = here.irecv(tensor, peer, 1)
    held = tensor.lent
    here.send(peer, 1, b"x" * 64)
    request.wait()
    here.poll()
    assert (held, tensor.lent) == (1, 0) and tensor.seen().tobytes() == b"x" * 64


def test_a_registered_tensor_is_held_until_the_node_is_closed(here, cuda):
    tensor = Tensor(cuda, numpy.zeros(64, numpy.uint8))
    here.register(tensor).free()
    held = tensor.lent
    here.close()
    assert (held, tensor.lent) == (1, 0)


def test_a_receive_that_expires_gives_its_tensor_back(here, cuda):
    tensor = Tensor(cuda, numpy.zeros(64, numpy.uint8))
    with pytest.raises(fishplate.Timeout):
        here.recv(tensor, timeout=0)
    here.poll()
    assert tensor.lent == 0


def test_names_of_devices():
    for name in ("cuda", "cuda:x", "rocm:0", ""):
        with pytest.raises(fishplate.Misuse) as refused:
            fishplate.Node(gpu=name)
        assert refused.value.kind == "setting"
    with pytest.raises(fishplate.Error) as refused:
        fishplate.Node(gpu="cuda:77")
    assert refused.value.kind == "device" and "cuda:77" in str(refused.value)
