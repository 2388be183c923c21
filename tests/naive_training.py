"""Slow oracles for the device half; they import nothing of corpusmill."""

import math

import torch


def allowed_pairs(lengths):
    """bool[T, T]: may query row i read key row j? Same segment, and not later."""
    owner = [segment for segment, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor([[owner[i] == owner[j] and j <= i for j in range(len(owner))] for i in range(len(owner))])


def dense_attention(q_TNH, k_TNH, v_TNH, lengths):
    """Softmax over a full T x T matrix with the forbidden pairs struck out, one head at a time."""
    group = q_TNH.shape[1] // k_TNH.shape[1]
    mask = allowed_pairs(lengths)
    heads = []
    for n in range(q_TNH.shape[1]):
        q, k, v = q_TNH[:, n], k_TNH[:, n // group], v_TNH[:, n // group]
        scores = (q @ k.T) / math.sqrt(q.shape[1])
        scores = scores.masked_fill(~mask, -math.inf)
        weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
        heads.append((weights / weights.sum(dim=1, keepdim=True)) @ v)
    return torch.stack(heads, dim=1)


def dense_attention_backward(grad_TNH, q_TNH, k_TNH, v_TNH, lengths):
    """Gradients of dense_attention by hand: dV = P'dO, dS = P (dO V' - rowsum), dQ = dS K, dK = dS' Q."""
    group = q_TNH.shape[1] // k_TNH.shape[1]
    scale = 1 / math.sqrt(q_TNH.shape[2])
    mask = allowed_pairs(lengths)
    grad_q, grad_k, grad_v = torch.zeros_like(q_TNH), torch.zeros_like(k_TNH), torch.zeros_like(v_TNH)
    for n in range(q_TNH.shape[1]):
        q, k, v, grad = q_TNH[:, n], k_TNH[:, n // group], v_TNH[:, n // group], grad_TNH[:, n]
        weights = ((q @ k.T) * scale).masked_fill(~mask, -math.inf).softmax(dim=1)
        grad_weights = grad @ v.T
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(dim=1, keepdim=True))
        grad_q[:, n] = grad_scores @ k * scale
        grad_k[:, n // group] += grad_scores.T @ q * scale
        grad_v[:, n // group] += weights.T @ grad
    return grad_q, grad_k, grad_v


def dense_attention_lse(q_TNH, k_TNH, lengths):
    """Log-sum-exp of the allowed scores: [N, T]."""
    group = q_TNH.shape[1] // k_TNH.shape[1]
    mask = allowed_pairs(lengths)
    rows = []
    for n in range(q_TNH.shape[1]):
        scores = (q_TNH[:, n] @ k_TNH[:, n // group].T) / math.sqrt(q_TNH.shape[2])
        rows.append(scores.masked_fill(~mask, -math.inf).logsumexp(dim=1))
    return torch.stack(rows).float()


def cross_entropy_of(logits, target):
    """-log softmax(logits)[target] of one token, from Python floats."""
    top = max(logits)
    return top + math.log(sum(math.exp(value - top) for value in logits)) - logits[target]


def parameter_shapes(*, vocab, width, layers, heads, kv_heads, ff, positions, layer_norm, learned, tied):
    """Every weight of the decoder, written out."""
    head = width // heads
    norm = [(width,), (width,)] if layer_norm else [(width,)]
    shapes = [(vocab, width)]
    shapes += [(positions, width)] if learned else []
    for _ in range(layers):
        shapes += [*norm, (width, width), (kv_heads * head, width), (kv_heads * head, width), (width, width)]
        shapes += [*norm, (ff, width), (ff, width), (width, ff)]
    shapes += norm
    return shapes + ([] if tied else [(vocab, width)])


def adamw_update(weight, gradient, mean, variance, *, step, rate, betas, decay, eps=1e-8):
    """One step of AdamW (Loshchilov and Hutter, algorithm 2) on float tensors; step counts from 1."""
    weight = weight * (1 - rate * decay)
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    variance = betas[1] * variance + (1 - betas[1]) * gradient * gradient
    corrected = mean / (1 - betas[0] ** step)
    scale = (variance / (1 - betas[1] ** step)).sqrt() + eps
    return weight - rate * corrected / scale, mean, variance
