"""Blocks of memory: used again, shared by programs, and given back to the system."""

import subprocess
import sys
import threading

from shorthaul._memory import Blocks, Pool

MIB = 1 << 20


def _lent(pool, *sizes):
    return [pool.lend(size * MIB) for size in sizes]


def test_a_block_comes_back_when_its_tensor_dies():
    pool = Pool()
    first = pool.lend(5 * MIB)
    address = first.data_ptr()
    assert first.numel() == 5 * MIB and address % 64 == 0
    view = first[7:].view(-1)
    del first
    assert pool.lend(5 * MIB).data_ptr() != address, "a view still uses it"
    del view
    kept = _lent(pool, 5, 5)
    assert address in {tensor.data_ptr() for tensor in kept}
    assert pool.n_bytes == 12 * MIB


def test_sizes_share_the_memory_of_the_largest():
    pool = Pool()
    for size in (40, 10, 33, 21, 40, 5, 17, 39, 28):
        _lent(pool, size, 8)
        assert pool.n_bytes <= 60 * MIB


def test_a_small_block_does_not_take_a_large_one_while_there_is_room():
    pool = Pool()
    _lent(pool, 64, 16)
    # The 16 MiB are free too.
    (small,) = _lent(pool, 10)
    (large,) = _lent(pool, 64)
    assert pool.n_bytes == 80 * MIB
    assert small.numel() == 10 * MIB and large.numel() == 64 * MIB


def test_what_was_held_goes_back_after_a_while():
    pool = Pool()
    held = _lent(pool, *[16] * 10)
    assert pool.n_bytes == 160 * MIB
    del held
    for _ in range(400):
        _lent(pool, 16)
    assert pool.n_bytes == 16 * MIB


def test_a_step_with_many_blocks_keeps_them():
    pool = Pool()
    held = _lent(pool, *[4] * 50)
    addresses = {tensor.data_ptr() for tensor in held}
    for _ in range(30):
        del held
        held = _lent(pool, *[4] * 50)
        assert {tensor.data_ptr() for tensor in held} == addresses


def test_a_program_that_is_gone_leaves_nothing():
    from shorthaul._memory import POOL

    blocks = Blocks()
    before = POOL.n_bytes
    lent = blocks.lend(64 * MIB)
    assert POOL.n_bytes >= 64 * MIB
    del lent
    del blocks
    assert POOL.n_bytes <= before


def test_threads_never_get_one_block_at_once():
    pool, wrong = Pool(), []

    def work(number):
        for _ in range(200):
            tensor = pool.lend(2 * MIB)
            tensor[:8] = number
            tensor[-8:] = number
            if not (tensor[:8] == number).all() or not (tensor[-8:] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # Each thread has two blocks while it takes the next one; a quarter more may be kept.
    assert pool.n_bytes <= 20 * MIB


PROCESS = """
import ctypes, gc, os, torch, shorthaul
from torch import nn

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # What is free, but not yet given back, is no one's.
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

torch.set_num_threads(2)
layers = [layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())]
model = shorthaul.module(nn.Sequential(*layers))
{body}
"""

SIZES = """
def step(n):
    model(torch.randn(n, 128)).square().mean().backward()

step(16384), step(16384)
before = resident()
for n in range(16000, 8000, -1000):
    step(n), step(n), step(n)
print(before, resident())
"""

HELD = """
def run():
    return model(torch.randn(16384, 128)).square().mean()

run().backward(), run().backward()
before = resident()
held = [run() for _ in range(8)]
most = resident()
sum(held).backward()
del held
for _ in range(150):
    run().backward()
print(before, most, resident())
"""


def _measured(body: str) -> list[int]:
    code = PROCESS.format(body=body)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return [int(word) for word in run.stdout.split()]


def test_a_model_with_many_sizes_takes_the_memory_of_one():
    before, after = _measured(SIZES)
    # A step of the largest size keeps 64 MiB and more, and one of the smallest half of it.
    assert after - before < 60, (before, after)


def test_memory_of_held_steps_is_given_back():
    before, most, after = _measured(HELD)
    assert most - before > 300, (before, most)
    assert after - before < 120, (before, most, after)


CHECKPOINTS = """
from shorthaul._memory import POOL
from torch.utils.checkpoint import checkpoint

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(8)
        )

    def forward(self, x, is_saved):
        for block in self.blocks:
            x = x + (block(x) if is_saved else checkpoint(block, x, use_reentrant=False))
        return x

model = shorthaul.module(Blocks(), fallback="error")
x = torch.randn(8192, 64)
y = model(x, False)
checkpointed = POOL.n_bytes >> 20
y.sum().backward()
y = model(x, True)
print(checkpointed, POOL.n_bytes >> 20)
"""


def test_a_checkpoint_inside_of_a_model_saves_its_memory():
    checkpointed, saved = _measured(CHECKPOINTS)
    # Each block keeps the 16 MiB of its tanh.
    assert checkpointed <= 48 and saved >= 8 * 16, (checkpointed, saved)
