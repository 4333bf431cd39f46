"""The paper's formulas as slow float64 loops, independent of manyclass and torch."""

import itertools
import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def softplus(x):
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def objective(name, target, target_score, slots, *, num_classes, target_kappa=None, margin=None, log_z=0.0):
    """Return the loss of one example, and γ as a list over all classes.

    Args:
        name: the objective's name.
        target: the target class.
        target_score: s(target).
        slots: (class, score, κ) of each slot that is not empty.
        num_classes: C.
        target_kappa: κ of the target.
        margin: margin of ranking; None means log(C - 1).
        log_z: log z of noise contrastive estimation.
    """
    gamma = [0.0] * num_classes
    u = [(c, math.exp(s), kappa) for c, s, kappa in slots]
    u_target = math.exp(target_score)
    n = len(slots)
    loss = 0.0
    if name == "likelihood":
        z = u_target + sum(kappa * value for _, value, kappa in u)
        loss = math.log(z) - target_score
        gamma[target] += 1 - u_target / z
        for c, value, kappa in u:
            gamma[c] -= kappa * value / z
    elif name == "plain importance" and n:
        z = sum(kappa * value for _, value, kappa in u)
        loss = math.log(z) - target_score
        gamma[target] += 1
        for c, value, kappa in u:
            gamma[c] -= kappa * value / z
    elif name == "subset softmax":
        z = u_target + sum(value for _, value, _ in u)
        loss = math.log(z) - target_score
        gamma[target] += 1 - u_target / z
        for c, value, _ in u:
            gamma[c] -= value / z
    elif name == "logistic ranking" and n:
        margin = math.log(num_classes - 1) if margin is None else margin
        for c, s, _ in slots:
            loss += softplus(-(target_score - s - margin)) / n
            share = (1 - sigmoid(target_score - s - margin)) / n
            gamma[target] += share
            gamma[c] -= share
    elif name == "hinge ranking" and n:
        for c, s, _ in slots:
            loss += max(0.0, margin - target_score + s) / n
            if target_score - s < margin:
                gamma[target] += 1 / n
                gamma[c] -= 1 / n
    elif name == "negative sampling" and n:
        for c, s, _ in slots:
            loss += (softplus(-target_score) + softplus(s)) / n
            gamma[target] += (1 - sigmoid(target_score)) / n
            gamma[c] -= sigmoid(s) / n
    elif name == "negative sampling, undivided" and n:
        loss = softplus(-target_score)
        gamma[target] += 1 - sigmoid(target_score)
        for c, s, _ in slots:
            loss += softplus(s)
            gamma[c] -= sigmoid(s)
    elif name == "noise contrastive":
        p, noise = u_target / math.exp(log_z), 1 / target_kappa
        loss = -math.log(p / (p + noise))
        gamma[target] += noise / (p + noise)
        for c, value, kappa in u:
            p, noise = value / math.exp(log_z), 1 / kappa
            loss -= math.log(noise / (p + noise))
            gamma[c] -= p / (p + noise)
    elif name == "blackout":
        z = target_kappa * u_target + sum(kappa * value for _, value, kappa in u)
        p_target = target_kappa * u_target / z
        p = [kappa * value / z for _, value, kappa in u]
        loss = -math.log(p_target) - sum(math.log(1 - x) for x in p)
        # ∂ log p̃(a)/∂ s(b) = [a = b] - p̃(b); ∂ log(1 - p̃(a))/∂ s(b) = -p̃(a)/(1 - p̃(a)) ([a = b] - p̃(b)).
        odds = [x / (1 - x) for x in p]
        gamma[target] += 1 - p_target + sum(odds) * p_target
        for (c, _, _), x, own in zip(u, p, odds, strict=True):
            gamma[c] += -x - own + sum(odds) * x
    return loss, gamma


def exponent(frequency, k):
    """Solve Σ f^α = k for α over the classes with f > 0, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if sum(f**middle for f in frequency if f > 0) > k:
            low = middle
        else:
            high = middle
    return low


def bernoulli_probabilities(weights, k):
    """Return b = f^α for positive weights and 0 for the others; α = 0 if k covers all positive ones."""
    positive = sum(w > 0 for w in weights)
    if positive == 0:
        return [0.0] * len(weights)
    frequency = [w / sum(weights) for w in weights]
    alpha = 0.0 if k >= positive else exponent(frequency, k)
    return [f**alpha if f > 0 else 0.0 for f in frequency]


def inclusion_probabilities(weights, k):
    """Solve Σ π = k for π = min(1, a·w) by bisection on a; π = 1 for positive weights if k covers them."""
    positive = sum(w > 0 for w in weights)
    if k >= positive:
        return [1.0 if w > 0 else 0.0 for w in weights]
    low, high = 0.0, k / min(w for w in weights if w > 0)
    for _ in range(300):
        middle = (low + high) / 2
        if sum(min(1.0, middle * w) for w in weights) > k:
            high = middle
        else:
            low = middle
    return [min(1.0, low * w) for w in weights]


def importance_variance(z, q, draws):
    """Return the variance of 1/S Σ z/q over S draws from q."""
    return (sum(a * a / b for a, b in zip(z, q, strict=True) if b > 0) - sum(z) ** 2) / draws


def bernoulli_variance(z, b):
    return sum((1 / p - 1) * a * a for a, p in zip(z, b, strict=True) if p > 0)


def systematic_breakpoints(pi):
    """Return the offsets in [0, 1) at which the systematic sample changes, and 0 and 1."""
    edges, position = {0.0, 1.0}, 0.0
    for p in pi:
        if p < 1 - 1e-9:
            position += p
            edges.add(position % 1.0)
    return sorted(edges)


def systematic_variance(z, pi):
    """Return the exact variance of Σ z/π over the one uniform offset."""
    edges = systematic_breakpoints(pi)
    total = square = 0.0
    for low, high in itertools.pairwise(edges):
        offset, estimate, position = (low + high) / 2, 0.0, 0.0
        for a, p in zip(z, pi, strict=True):
            if p >= 1 - 1e-9:
                estimate += a
            else:
                times_drawn = math.floor(position + p - offset) - math.floor(position - offset)
                estimate += times_drawn * a / p
                position += p
        total += (high - low) * estimate
        square += (high - low) * estimate**2
    return square - total**2


def stratified_variance(z, pi):
    """Return the variance of Σ z/π with one point at a separate uniform offset in each unit of the line."""
    moments, position = {}, 0.0
    for a, p in zip(z, pi, strict=True):
        if p >= 1 - 1e-9:
            continue
        end = position + p
        for unit in range(math.floor(position), math.ceil(end)):
            share = min(end, unit + 1) - max(position, unit)
            mean, square = moments.get(unit, (0.0, 0.0))
            moments[unit] = mean + share * a / p, square + share * (a / p) ** 2
        position = end
    return sum(square - mean**2 for mean, square in moments.values())


def log_likelihood(scores, target):
    """Return log p(target) of a softmax over all scores."""
    scores = np.asarray(scores, dtype=np.float64)
    return float(scores[target] - np.log(np.sum(np.exp(scores - scores.max()))) - scores.max())
