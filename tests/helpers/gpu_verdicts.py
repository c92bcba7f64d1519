"""How far a layout may be from one GPU, and what is wrong where it is further; see `gpu_layouts`."""

from typing import Any

import numpy as np

FP32_BOUND = 1e-5
"""Of float32 gradients and log-probs: the same arithmetic in another order."""
HUGGING_FACE_BOUND = 2e-5
RESUME_BOUND = 1e-4
"""Of loss and gradient norm two updates on: Adam makes more of rounding than a gradient does."""
TIMES_NOISE = 2.0
"""In bfloat16 a layout may be this much further from float32 than one GPU in bfloat16 is: both round as often, and each
at other places, so their distances are draws of about the same size. A wrong mask, scale or sum is off by far more."""
TIMES_NOISE_OF_A_MIXTURE = 3.0
"""Rounding sends a token near a tie to another expert: a few such tokens make most of the noise, and vary more."""


def judged(
    measured: dict[str, Any], truth: dict[str, Any], noisy: dict[str, Any] | None, *, mixture: bool
) -> dict[str, Any]:
    """Distances from `truth`, one GPU in float32, beside those of `noisy`, one GPU in bfloat16, and what is wrong."""
    factor = TIMES_NOISE_OF_A_MIXTURE if mixture else TIMES_NOISE
    problems = []
    if not measured["ranks_agree"]:
        problems.append("ranks of one replica read different log-probs")
    weights = (noisy or truth)["weights"]
    if measured["weights"].keys() != weights.keys() or not all(
        bool((tensor == weights[name]).all()) for name, tensor in measured["weights"].items()
    ):
        problems.append("the exported weights are not those of one GPU to the bit")
    if measured["gradients"].keys() != truth["gradients"].keys():
        odd = sorted(measured["gradients"].keys() ^ truth["gradients"].keys())
        return {"problem": f"other tensors: {odd[:4]}"}
    result = _distances(measured, truth)
    if noisy is None:
        for name in ("logprob", "worst_gradient"):
            if not result[name] <= FP32_BOUND:
                problems.append(f"{name} {result[name]:.1e} is above {FP32_BOUND:.0e} ({result['worst_name']})")
        return {**result, "problem": "; ".join(problems) or None}
    noise = _distances(noisy, truth)
    typical = float(np.median(list(_gradient_distances(noisy, truth).values())))
    own, others = _gradient_distances(measured, truth), _gradient_distances(noisy, truth)
    ratios = {name: own[name] / max(others[name], typical) for name in own}
    worst = max(ratios, key=lambda name: ratios[name] if ratios[name] == ratios[name] else np.inf)
    for name in ("logprob", "logprob_rms", "gradient"):
        if not result[name] <= factor * noise[name]:
            problems.append(f"{name} {result[name]:.1e} is above {factor} x the noise {noise[name]:.1e}")
    if not ratios[worst] <= factor:
        problems.append(f"gradient of {worst}: {own[worst]:.1e}, {ratios[worst]:.1f} x the noise")
    return {
        **result,
        "noise_logprob": noise["logprob"],
        "noise_logprob_rms": noise["logprob_rms"],
        "noise_gradient": noise["gradient"],
        "worst_ratio": ratios[worst],
        "worst_ratio_name": worst,
        "problem": "; ".join(problems) or None,
    }


def _distances(measured: dict[str, Any], truth: dict[str, Any]) -> dict[str, Any]:
    difference = measured["logprobs"].astype(np.float64) - truth["logprobs"]
    by_name = _gradient_distances(measured, truth)
    worst = max(by_name, key=lambda name: by_name[name] if by_name[name] == by_name[name] else np.inf)
    squares = [
        (
            float((tensor.double() - truth["gradients"][name].double()).square().sum()),
            float(truth["gradients"][name].double().square().sum()),
        )
        for name, tensor in measured["gradients"].items()
    ]
    off, size = np.sum(squares, axis=0)
    return {
        "logprob": float(np.abs(difference).max()),
        "logprob_rms": float(np.sqrt(np.mean(difference**2))),
        "gradient": float(np.sqrt(off / size)),
        "worst_gradient": by_name[worst],
        "worst_name": worst,
    }


def _gradient_distances(measured: dict[str, Any], truth: dict[str, Any]) -> dict[str, float]:
    """By norm, relative to the tensor's; an expert that no token came to must have no gradient here either."""
    distances = {}
    for name, expected in truth["gradients"].items():
        off, size = float((measured["gradients"][name] - expected).norm()), float(expected.norm())
        distances[name] = off / size if size else (0.0 if off == 0 else float("inf"))
    return distances
