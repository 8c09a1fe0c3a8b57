"""Results of the bench with given times, for tests that measure nothing."""

from shorthaul.bench import timing


def measured(name="net", own=(10.0, 10.1, 9.9, 10.2), eager=None, **more):
    """What the bench measures of a network, with these times."""
    times = {"shorthaul": list(own), "eager": list(eager or [20.0] * len(own))}
    variants = {variant: timing.summary(taken) for variant, taken in times.items()}
    setting = {"name": name, "batch": 8, "threads": 2, "dtype": "f32", "mode": "train"}
    rounds = {"rounds": len(own), "n_parameters": 1, "variants": variants}
    return setting | rounds | timing.ratios(times) | more
