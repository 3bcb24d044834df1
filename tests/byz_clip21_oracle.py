# SPDX-License-Identifier: Apache-2.0
"""Algorithms 1-5 of arXiv 2603.23472 as float64 NumPy loops, indices as printed.

Written from the paper alone and shares nothing with the package. Every algorithm
returns a list of rounds: entry ``t`` holds the variables with upper index ``t + 1``
as a dict of arrays, ``x`` and ``g`` of shape ``[d]``, the others ``[n, d]``.

``gradient(i, t, x)`` and ``noise(i, t)`` are what client i draws in the round whose
variables have upper index t. Byzantine clients run the client code too, so that an
attack may start from what they would have sent:
``attack(messages, byzantine) -> messages``.
"""

import numpy as np

# --- Section 3: aggregation ------------------------------------------------------


def mean(rows):
    return np.asarray(rows).sum(axis=0) / len(rows)


def cm(rows):
    """Coordinate-wise median; even n: average of the two middle values."""
    n, d = len(rows), len(rows[0])
    out = np.empty(d)
    for j in range(d):
        column = sorted(np.inf if np.isnan(r[j]) else float(r[j]) for r in rows)
        out[j] = (column[(n - 1) // 2] + column[n // 2]) / 2
    return out


def cwtm(f):
    """Coordinate-wise trimmed mean."""

    def rule(rows):
        n, d = len(rows), len(rows[0])
        out = np.empty(d)
        for j in range(d):
            column = sorted(np.inf if np.isnan(r[j]) else float(r[j]) for r in rows)
            out[j] = sum(column[f : n - f]) / (n - 2 * f)
        return out

    return rule


def nnm(f, base):
    """Replace x_i by the mean of the n - f inputs closest to it, then ``base``."""

    def rule(rows):
        n = len(rows)
        mixed = []
        for i in range(n):
            if not np.all(np.isfinite(rows[i])):
                mixed.append(np.full(len(rows[i]), np.inf))
                continue
            gaps = []
            for k in range(n):
                finite = np.all(np.isfinite(rows[k]))
                gap = np.sum((rows[i] - rows[k]) ** 2) if finite else np.inf
                gaps.append((float(gap), k))
            near = [k for _, k in sorted(gaps)[: n - f]]
            mixed.append(sum(rows[k] for k in near) / (n - f))
        return base(mixed)

    return rule


# --- Section 4: attacks ----------------------------------------------------------


def ipm(scale):
    def attack(messages, byzantine):
        honest = [m for i, m in enumerate(messages) if i not in byzantine]
        forged = -scale * mean(honest)
        return [forged if i in byzantine else m for i, m in enumerate(messages)]

    return attack


def sign_flip(scale):
    def attack(messages, byzantine):
        return [-scale * m if i in byzantine else m for i, m in enumerate(messages)]

    return attack


def constant(value):
    def attack(messages, byzantine):
        return [
            np.full(len(m), value) if i in byzantine else m
            for i, m in enumerate(messages)
        ]

    return attack


def honest(messages, byzantine):
    del byzantine
    return messages


def silent(i, t):
    del i, t
    return 0.0


# --- Algorithms ------------------------------------------------------------------


def clip(z, tau):
    norm = np.sqrt(np.sum(z * z))
    return z if norm <= tau else (tau / norm) * z


def algorithm1(
    x0,
    gradient,
    n,
    rounds,
    *,
    gamma,
    beta,
    beta_hat,
    tau,
    ragg,
    noise=silent,
    attack=honest,
    byzantine=(),
    init=None,
    compressor=None,
):
    """Byz-Clip21-SGD2M; ``init`` is the common g_i^0 = m_i^0, zero if None."""
    d = len(x0)
    c_op = (lambda z: clip(z, tau)) if compressor is None else compressor
    first = np.zeros(d) if init is None else np.array(init, float)
    x = np.array(x0, float)
    v = [np.zeros(d) for _ in range(n)]
    g_i = [first.copy() for _ in range(n)]
    m = [first.copy() for _ in range(n)]
    g = ragg(m)
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        c = []
        for i in range(n):
            v[i] = (1 - beta) * v[i] + beta * gradient(i, t + 1, x)
            q = c_op(v[i] - g_i[i])
            c.append(q + noise(i, t + 1))
            g_i[i] = g_i[i] + beta_hat * q
        c = attack(c, byzantine)
        m = [m[i] + beta_hat * c[i] for i in range(n)]
        g = ragg(m)
        trace.append(_round(x=x, v=v, g_i=g_i, m=m, c=c, g=g))
    return trace


def algorithm2(
    x0, gradient, n, rounds, *, gamma, beta, ragg, attack=honest, byzantine=()
):
    """Byz-SGDM."""
    d = len(x0)
    x, g = np.array(x0, float), np.zeros(d)
    v = [np.zeros(d) for _ in range(n)]
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        for i in range(n):
            v[i] = (1 - beta) * v[i] + beta * gradient(i, t + 1, x)
        sent = attack(list(v), byzantine)
        g = ragg(sent)
        trace.append(_round(x=x, v=v, m=sent, g=g))
    return trace


def algorithm3(
    x0,
    gradient,
    n,
    rounds,
    *,
    gamma,
    tau,
    ragg,
    noise=silent,
    attack=honest,
    byzantine=(),
):
    """Byz-Clip-SGD."""
    x, g = np.array(x0, float), np.zeros(len(x0))
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        m = []
        for i in range(n):
            g_i = clip(gradient(i, t + 1, x), tau)
            m.append(g_i + noise(i, t + 1))
        m = attack(m, byzantine)
        g = ragg(m)
        trace.append(_round(x=x, m=m, g=g))
    return trace


def algorithm4(
    x0,
    gradient,
    n,
    rounds,
    *,
    gamma,
    beta,
    tau,
    ragg,
    noise=silent,
    attack=honest,
    byzantine=(),
):
    """Safe-DSHB; ``m`` is kept by the client, what it sends may be replaced."""
    d = len(x0)
    x, g = np.array(x0, float), np.zeros(d)
    m = [np.zeros(d) for _ in range(n)]
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        for i in range(n):
            g_i = clip(gradient(i, t + 1, x), tau)
            m[i] = (1 - beta) * m[i] + beta * (g_i + noise(i, t + 1))
        sent = attack(list(m), byzantine)
        g = ragg(sent)
        trace.append(_round(x=x, m=sent, g=g))
    return trace


def algorithm5(
    x0,
    examples,
    n,
    rounds,
    *,
    gamma,
    beta,
    beta_hat,
    tau_i,
    tau_o,
    ragg,
    noise=silent,
    attack=honest,
    byzantine=(),
):
    """Byz-Clip21-SGD2M+; ``examples(i, t, x)`` lists the sampled f_ij gradients.

    ``noise`` is inside the sum over j, the same for every j, as printed.
    """
    d = len(x0)
    x = np.array(x0, float)
    v = [np.zeros(d) for _ in range(n)]
    g_i = [np.zeros(d) for _ in range(n)]
    m = [np.zeros(d) for _ in range(n)]
    g = ragg(m)
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        c = []
        for i in range(n):
            drawn = examples(i, t + 1, x)
            omega = noise(i, t + 1)
            total = np.zeros(d)
            for gradient in drawn:
                total = total + clip(gradient, tau_i) + omega
            v[i] = (1 - beta) * v[i] + (beta / len(drawn)) * total
            q = clip(v[i] - g_i[i], tau_o)
            c.append(q)
            g_i[i] = g_i[i] + beta_hat * q
        c = attack(c, byzantine)
        m = [m[i] + beta_hat * c[i] for i in range(n)]
        g = ragg(m)
        trace.append(_round(x=x, v=v, g_i=g_i, m=m, c=c, g=g))
    return trace


def clip21_sgd2m(x0, gradient, n, rounds, *, gamma, beta, beta_hat, tau, noise=silent):
    """Clip21-SGD2M in the server form g^{t+1} = g^t + beta_hat mean(c)."""
    d = len(x0)
    x, g = np.array(x0, float), np.zeros(d)
    v = [np.zeros(d) for _ in range(n)]
    g_i = [np.zeros(d) for _ in range(n)]
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        total = np.zeros(d)
        for i in range(n):
            v[i] = (1 - beta) * v[i] + beta * gradient(i, t + 1, x)
            q = clip(v[i] - g_i[i], tau)
            g_i[i] = g_i[i] + beta_hat * q
            total = total + q + noise(i, t + 1)
        g = g + beta_hat * total / n
        trace.append(_round(x=x, v=v, g_i=g_i, g=g))
    return trace


def ef21_sgdm(x0, gradient, n, rounds, *, gamma, beta, compressor):
    """EF21-SGDM (beta = 1: EF21-SGD): g_i += C(v_i - g_i), g = mean(g_i)."""
    d = len(x0)
    x, g = np.array(x0, float), np.zeros(d)
    v = [np.zeros(d) for _ in range(n)]
    g_i = [np.zeros(d) for _ in range(n)]
    trace = []
    for t in range(rounds):
        x = x - gamma * g
        for i in range(n):
            v[i] = (1 - beta) * v[i] + beta * gradient(i, t + 1, x)
            g_i[i] = g_i[i] + compressor(v[i] - g_i[i])
        g = mean(g_i)
        trace.append(_round(x=x, v=v, g_i=g_i, g=g))
    return trace


def _round(**variables):
    return {name: np.array(value) for name, value in variables.items()}
