"""Checks and measures device memory with torch and cupy on an NVIDIA GPU: two processes on
`cuda:0`. `tests/python-gpu.sh` runs it. Prints `ok`, `SKIPPED` or `FAILED` for each check, and one
table. The table compares fishplate with a torch copy within one process, and with torch
between processes: CUDA IPC by `reduce_tensor`, `copy_`, a synchronisation and a pipe."""

import multiprocessing
import queue
import socket
import statistics
import sys
import time
import traceback

import torch
from torch.multiprocessing.reductions import reduce_tensor

import fishplate

MOST = 256 << 20
LATENCIES = [8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20]
BANDWIDTHS = [1 << n for n in range(10, 29, 2)]
# Time limit of the two processes, in seconds.
SECONDS = 65
# Each round launches a kernel. Two processes alternate on the device, and a switch may take
# milliseconds.
KERNEL_ROUNDS = 1000
KERNEL_SECONDS = 20
KERNEL = r"""
extern "C" __global__ void poll(const volatile unsigned long long* word, unsigned long long want,
        const volatile unsigned long long* data, long long count, unsigned long long* wrong) {
    long long tries = 0;
    while (*word != want) {
        if (++tries > 4000000000ll) { atomicAdd(wrong, 1ull << 32); return; }
    }
    __threadfence_system();
    for (long long at = threadIdx.x; at < count; at += blockDim.x) {
        if (data[at] != want) { atomicAdd(wrong, 1ull); }
    }
}
"""


def sync():
    torch.cuda.synchronize()


class Here:
    """One of the two processes."""

    def __init__(self, address, pipe):
        self.job, self.pipe = fishplate.Job(address, 2, 60), pipe
        self.node = fishplate.Node(fabric="off", gpu="cuda:0", timeout=30)
        self.peer = self.node.connect(self.job.exchange(self.node.address))
        self.rank = self.job.rank
        self.words = self.node.alloc(4096)
        self.their_words = self.peer.import_memory(self.job.exchange(self.words.handle()))
        self.source = torch.zeros(MOST, dtype=torch.uint8, device="cuda")
        self.into = torch.zeros(MOST, dtype=torch.uint8, device="cuda")
        sync()
        # Registered once; each call then takes a range.
        self.lent_source, self.lent_into = self.node.register(self.source), self.node.register(
            self.into
        )
        self.theirs = self.peer.import_memory(self.job.exchange(self.lent_into.handle()))
        self.turn = 0

    def barrier(self):
        self.job.barrier(self.node)

    def arrived(self):
        """Waits for the next signal of the other process."""
        self.turn += 1
        self.node.wait(self.words, ">=", self.turn, self.peer)


def tensors(here):
    node, peer = here.node, here.peer
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 1000, 3 << 18):
            mine = torch.arange(count, device="cuda").to(dtype) + here.rank
            expected = torch.arange(count, device="cuda").to(dtype) + (1 - here.rank)
            seen = here.into[: mine.nbytes].view(dtype)
            sync()
            # Unregistered memory.
            here.turn += 1
            node.put_signal(mine, here.theirs, here.their_words, here.turn)
            node.wait(here.words, ">=", here.turn, peer)
            assert torch.equal(seen, expected), (dtype, count, "put-signal")
            node.quiet(peer)
            got = torch.zeros_like(mine)
            sync()
            node.get(got, here.theirs)
            assert torch.equal(got, mine), (dtype, count, "get")
            got.zero_()
            sync()
            request = node.isend(peer, count, mine)
            message = node.recv(got, peer, count)
            assert message.len == mine.nbytes and torch.equal(got, expected), (
                dtype,
                count,
                "tagged",
            )
            request.wait()
            here.barrier()


def memory(here):
    node = here.node
    own = node.alloc_device(1 << 20)
    theirs = here.peer.import_memory(here.job.exchange(own.handle()))
    tensor = torch.from_dlpack(own).view(torch.float32)
    tensor.zero_()
    sync()
    here.barrier()
    here.turn += 1
    data = torch.full((1000,), here.rank + 0.5, device="cuda")
    sync()
    node.put_signal(data, theirs.at(64), here.their_words, here.turn)
    node.wait(here.words, ">=", here.turn, here.peer)
    assert tensor[16:1016].eq(1 - here.rank + 0.5).all() and tensor[:16].eq(0).all()
    del tensor
    by_array = torch.as_tensor(own[64:128], device="cuda").view(torch.float32)
    assert by_array.eq(1 - here.rank + 0.5).all()
    del by_array
    node.quiet()
    theirs.release()
    here.barrier()
    own.free()


def kernel(here):
    """A kernel of rank 1 polls a word in device memory. A put-signal of rank 0 sets the word."""
    import cupy

    node, sizes = here.node, [8, 4096, 65536, 1 << 20]
    word = node.alloc_device(4096)
    word.write(bytes(4096))
    their_word = here.peer.import_memory(here.job.exchange(word.handle()))
    here.source.zero_()
    here.into.zero_()
    sync()
    here.barrier()
    base, begun, took = here.turn, time.monotonic(), []
    rounds, wrong = 0, 0
    if here.rank == 1:
        poll = cupy.RawKernel(KERNEL, "poll")
        poll.compile()
        stream, count = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1, cupy.uint64)
        at = cupy.asarray(word).data.ptr
        cupy.cuda.Device().synchronize()
    for turn in range(1, KERNEL_ROUNDS + 1):
        size = sizes[turn % 4]
        if here.rank == 0:
            here.source[:size].view(torch.int64).fill_(turn)
            sync()
            node.wait(here.words, ">=", base + turn, here.peer)
            if here.words.load(8):
                break
            start = time.monotonic()
            node.put_signal(here.lent_source.at(0, size), here.theirs, their_word, turn)
            node.quiet(here.peer)
            took.append(time.monotonic() - start)
        else:
            late = time.monotonic() - begun > KERNEL_SECONDS
            if late:
                node.signal(here.their_words.at(8), 1)
                node.signal(here.their_words, base + turn)
                break
            with stream:
                arguments = (
                    at,
                    cupy.uint64(turn),
                    here.into.data_ptr(),
                    cupy.int64(size // 8),
                    count,
                )
                poll((1,), (32,), arguments)
                done = stream.record()
            node.signal(here.their_words, base + turn)
            while not done.done:
                node.poll()
        rounds = turn
    if here.rank == 1:
        stream.synchronize()
        wrong = int(count.get()[0])
    here.barrier()
    here.turn = base + rounds + 1
    node.signal(here.their_words.at(8), 0)
    node.signal(here.their_words, here.turn)
    node.wait(here.words, ">=", here.turn, here.peer)
    here.barrier()
    if here.rank == 0:
        return f"{rounds} rounds, {statistics.median(took) * 1e6:.0f} us each with quiet"
    assert wrong == 0, f"{wrong & 0xffffffff} wrong words, {wrong >> 32} kernels gave up"
    assert rounds >= 100, f"only {rounds} rounds in {KERNEL_SECONDS} s"


def best(run, rounds, blocks=3):
    """Returns the seconds of one round in the fastest block of rounds."""
    times = []
    for _ in range(blocks):
        begun = time.perf_counter()
        run(rounds)
        times.append((time.perf_counter() - begun) / rounds)
    return min(times)


def ping_pong(here, size, rounds):
    def run(rounds):
        source = here.lent_source.at(0, size)
        for _ in range(rounds):
            if here.rank == 0:
                here.node.put_signal(source, here.theirs, here.their_words, here.turn + 1)
            here.arrived()
            if here.rank == 1:
                here.node.put_signal(source, here.theirs, here.their_words, here.turn)

    return best(run, rounds) / 2


def pushed(here, size, rounds):
    def run(rounds):
        source = here.lent_source.at(0, size)
        for _ in range(rounds):
            here.node.put(source, here.theirs)
        here.node.quiet(here.peer)

    took = best(run, rounds) if here.rank == 0 else None
    here.barrier()
    return took


def ipc_ping_pong(here, theirs, size, rounds):
    source, to = here.source[:size], theirs[:size]

    def push():
        to.copy_(source)
        sync()
        here.pipe.send_bytes(b"!")

    def run(rounds):
        for _ in range(rounds):
            if here.rank == 0:
                push()
            here.pipe.recv_bytes()
            if here.rank == 1:
                push()

    return best(run, rounds) / 2


def copies(source, to, rounds):
    def run(rounds):
        for _ in range(rounds):
            to.copy_(source)
        sync()

    return best(run, rounds)


def figures(here):
    """Measures all rows. Rank 0 prints the table."""
    here.barrier()
    theirs, why = None, None
    try:
        here.pipe.send(reduce_tensor(here.into))
        rebuild, arguments = here.pipe.recv()
        theirs = rebuild(*arguments)
    except Exception as error:
        why = f"SKIPPED CUDA IPC of torch: {error}"
    usable = (
        here.job.exchange(b"\1" if theirs is not None else b"\0") == b"\1" and theirs is not None
    )
    lines = ["", "| bytes | put-signal, us | IPC, us | one process, us |", "|---|---|---|---|"]
    for size in LATENCIES:
        rounds = 300 if size <= 64 << 10 else 100 if size <= 1 << 20 else 20
        here.barrier()
        ours = ping_pong(here, size, rounds)
        here.barrier()
        ipc = ipc_ping_pong(here, theirs, size, rounds) if usable else float("nan")
        here.barrier()
        if here.rank == 0:
            alone = copies_alone(here, size, rounds)
            lines.append(f"| {size} | {ours * 1e6:.1f} | {ipc * 1e6:.1f} | {alone * 1e6:.1f} |")
        here.barrier()
    lines += ["", "| bytes | put, GB/s | IPC, GB/s | one process, GB/s |", "|---|---|---|---|"]
    for size in BANDWIDTHS:
        rounds = max(4, min(200, (1 << 30) // size))
        here.barrier()
        ours = pushed(here, size, rounds)
        if here.rank == 0:
            ipc = copies(here.source[:size], theirs[:size], rounds) if usable else float("nan")
            alone = copies(here.source[:size], here.into[:size], rounds)
            rates = " | ".join(f"{size / took / 1e9:.2f}" for took in (ours, ipc, alone))
            lines.append(f"| {size} | {rates} |")
        here.barrier()
    if here.rank == 0:
        if why:
            print(why)
        print("\n".join(lines))
        print(f"\ntransfers of rank 0: {here.node.gpu_stats()}")
    # The importer drops the memory before its owner does.
    del theirs
    here.barrier()


def copies_alone(here, size, rounds):
    def run(rounds):
        for _ in range(rounds):
            here.into[:size].copy_(here.source[:size])
            sync()

    return best(run, rounds)


def process(address, pipe, results):
    here = Here(address, pipe)
    # `memory` frees device memory. No kernel may poll meanwhile, so `memory` runs after `kernel`.
    for check in (tensors, kernel, memory, figures):
        begun = time.monotonic()
        try:
            told = check(here) or ""
            failed = ""
        except ImportError as error:
            told, failed = f"SKIPPED {error}", ""
        except Exception:
            told, failed = "", traceback.format_exc()
        results.put((here.rank, check.__name__, told, failed, time.monotonic() - begun))
        if failed:
            # Without this return, both processes would wait in the barrier until the deadline.
            return
    here.barrier()
    del here.source, here.into
    here.node.close()


def main():
    if not torch.cuda.is_available():
        print("SKIPPED device memory of Python on a GPU: torch finds none")
        sys.exit(77)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "127.0.0.1:%d" % server.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ends, results = spawn.Pipe(), spawn.Queue()
    both = [
        spawn.Process(target=process, args=(address, end, results), daemon=True) for end in ends
    ]
    for one in both:
        one.start()
    status, names = 0, ["tensors", "kernel", "memory", "figures"]
    properties = torch.cuda.get_device_properties(0)
    print(
        f"{properties.name}, torch {torch.__version__}, fishplate {fishplate.__version__}",
        flush=True,
    )
    end = time.monotonic() + SECONDS
    for _ in range(2 * len(names)):
        try:
            rank, name, told, failed, took = results.get(timeout=max(0, end - time.monotonic()))
        except queue.Empty:
            print("FAILED a process is gone, or does not end")
            status = 1
            break
        print(
            f"{'FAILED' if failed else 'ok'} {name}, rank {rank}, {took:.1f} s {told}", flush=True
        )
        if failed:
            print(failed)
            status = 1
            break
    for one in both:
        one.join(5 if status == 0 else 0)
        if one.exitcode != 0:
            status = 1
            print(f"FAILED a process ended with {one.exitcode}")
        one.kill()
    sys.exit(status)


if __name__ == "__main__":
    main()
