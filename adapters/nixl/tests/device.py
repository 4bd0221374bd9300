"""Memory of the first CUDA device: from the driver, or, with FISHPLATE_NIXL_TORCH, tensors of
PyTorch."""

import ctypes
import os

if "FISHPLATE_NIXL_TORCH" in os.environ:
    import torch


class Tensor:
    def __init__(self, size):
        # Like most tensors of a program, it does not begin at the start of its allocation.
        self.whole = torch.zeros(size + 512, dtype=torch.uint8, device="cuda:0")
        self.bytes = self.whole[512:]
        self.at = self.bytes.data_ptr()

    def write(self, offset, bytes):
        self.bytes[offset : offset + len(bytes)] = torch.from_numpy(bytes).cuda()
        torch.cuda.synchronize()

    def free(self):
        del self.whole, self.bytes

    def read(self, offset, into):
        torch.from_numpy(into)[:] = self.bytes[offset : offset + len(into)].cpu()


class Driver:
    """Memory of `cuMemAlloc`, and a pinned buffer to access it."""

    library = None

    def __init__(self, size):
        if Driver.library is None:
            Driver.library = ctypes.CDLL("libcuda.so.1")
            context = ctypes.c_void_p()
            self.call("cuInit", 0)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            self.call("cuCtxSetCurrent", context)
        at, pinned = ctypes.c_uint64(), ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(size))
        self.at, self.buffer = at.value, (ctypes.c_ubyte * size)()
        self.call("cuMemHostRegister_v2", self.buffer, ctypes.c_size_t(size), 3)
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(pinned), self.buffer, 0)
        self.pinned = pinned.value

    def call(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def copy(self, to, source, size):
        self.call(
            "cuMemcpyAsync",
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            None,
        )
        self.call("cuStreamSynchronize", None)

    def write(self, offset, bytes):
        ctypes.memmove(self.buffer, bytes.ctypes.data, len(bytes))
        self.copy(self.at + offset, self.pinned, len(bytes))

    def free(self):
        self.call("cuMemHostUnregister", self.buffer)
        self.call("cuMemFree_v2", ctypes.c_uint64(self.at))

    def read(self, offset, into):
        self.copy(self.pinned, self.at + offset, len(into))
        ctypes.memmove(into.ctypes.data, self.buffer, len(into))


Memory = Tensor if "FISHPLATE_NIXL_TORCH" in os.environ else Driver
