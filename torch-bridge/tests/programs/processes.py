"""Programs with threads, forked and spawned processes; each runs in a process of its own."""

import multiprocessing
import os
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .facts import gradients, observe, randn, training
from .registry import program


def _net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _in_threads(run, n=4):
    results, threads = [None] * n, []

    def work(k):
        try:
            results[k] = run(k)
        except Exception as error:
            results[k] = f"{type(error).__name__}: {error}"

    for k in range(n):
        threads.append(threading.Thread(target=work, args=(k,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return results


@program(alone=True)
def threads_call_one_model(wrap):
    m = wrap(_net())
    m(torch.ones(1, 4))
    return _in_threads(lambda k: observe(m(torch.full((3, 4), float(k)))))


@program(alone=True)
def threads_compile_one_model(wrap):
    m = wrap(_net())
    return _in_threads(lambda k: observe(m(torch.full((k + 1, 4), float(k)))))


@program(alone=True)
def threads_compile_models_of_their_own(wrap):
    models = [_net() for _ in range(4)]

    def run(k):
        m = wrap(models[k])
        m(torch.full((3, 4), float(k))).sum().backward()
        return gradients(models[k])

    return _in_threads(run)


@program(alone=True)
def threads_compile_beside_eager(wrap):
    """Half of the threads never touch a wrapped model; their numbers must not change."""
    models = [_net() for _ in range(4)]

    def run(k):
        m = wrap(models[k]) if k % 2 else models[k]
        seen = []
        for n in (2, 3, 4):
            models[k].zero_grad()
            out = m(torch.full((n, 4), float(k)))
            out.sum().backward()
            seen.append([observe(out), gradients(models[k])])
        return seen

    return _in_threads(run)


@program(alone=True)
def thread_with_its_own_gradient_mode(wrap):
    m = wrap(_net())

    def run(k):
        with torch.set_grad_enabled(k % 2 == 0):
            return observe(m(torch.full((3, 4), float(k))))

    return [_in_threads(run), m(torch.ones(1, 4))]


def _in_fork(run):
    """The numbers that ``run`` returns in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "failed"
        try:
            text = " ".join(repr(float(v)) for v in run().flatten())
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text if text == "failed" else [float(v) for v in text.split()]


@program(alone=True)
def forked_child_calls(wrap):
    m = wrap(_net())
    with torch.no_grad():
        m(torch.ones(3, 4))
        return [_in_fork(lambda: m(torch.ones(3, 4) * 2)), m(torch.ones(3, 4))]


@program(alone=True)
def forked_child_compiles(wrap):
    m = wrap(_net())
    with torch.no_grad():
        return [_in_fork(lambda: m(torch.ones(3, 4))), m(torch.ones(3, 4))]


@program(alone=True)
def forked_children_side_by_side_with_parent(wrap):
    # OpenMP's threads do not survive a fork: on some machines a product of PyTorch's own that the
    # parent ran with several threads never ends in its children.
    torch.set_num_threads(1)
    m, results = wrap(_net()), []
    with torch.no_grad():
        x = torch.ones(200, 4)
        m(x)
        for k in range(3):
            results.append(_in_fork(lambda k=k: sum(m(x * k).sum(0) for _ in range(20))))
            results.append(observe(m(x * k).sum(0)))
    return results


class _Rows(Dataset):
    """A data set whose rows come out of a model."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 6

    def __getitem__(self, k):
        with torch.no_grad():
            return self.model(torch.full((1, 4), float(k)))[0]


@program(alone=True)
def loader_workers_call_the_module(wrap):
    torch.set_num_threads(1)
    m = wrap(_net())
    m(torch.ones(1, 4))
    batches = list(DataLoader(_Rows(m), batch_size=2, num_workers=2))
    return [batches, m(torch.ones(1, 4))]


@program(alone=True)
def loader_workers_beside_training(wrap):
    model = nn.Linear(4, 2)
    m, seen = wrap(model), []
    data = [torch.full((4,), float(k)) for k in range(6)]
    for batch in DataLoader(data, batch_size=2, num_workers=2):
        seen.append(training(model, m, batch))
    return seen


def _spawned(model, queue):
    with torch.no_grad():
        queue.put(model(torch.ones(2, 4)).sum(0).tolist())


@program(alone=True)
def spawned_child_calls(wrap):
    model = _net()
    m = wrap(model)
    m(torch.ones(2, 4))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_spawned, args=(m, queue))
    child.start()
    try:
        found = queue.get(timeout=100)
    except Exception as error:
        found = type(error).__name__
    child.join(10)
    return [found, m(torch.ones(2, 4)).sum(0)]


@program(alone=True)
def backward_while_another_thread_runs_forward(wrap):
    model = _net()
    m = wrap(model)
    m(torch.ones(2, 4)).sum().backward()
    model.zero_grad()

    def run(k):
        if k % 2:
            with torch.no_grad():
                return [observe(m(torch.full((2, 4), float(k)))) for _ in range(5)]
        (g,) = torch.autograd.grad(m(x[k]).sum(), x[k])
        return observe(g)

    x = [randn(2, 4) for _ in range(4)]
    return _in_threads(run)


@program(alone=True)
def exit_of_a_thread_frees_its_scratch(wrap):
    m, seen = wrap(_net()), []
    for k in range(5):
        seen += _in_threads(lambda j, k=k: observe(m(torch.full((2, 4), float(k)))), 1)
    return seen
