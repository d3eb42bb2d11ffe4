"""Fisher blocks and curvature terms by automatic differentiation: the generic rule, and an oracle.

Three routes lead to the same geometry, and none knows any family.

From a log-partition. In a block-coordinate natural (BCN) parameterisation lambda = (lambda_1, ...,
lambda_m) the Fisher matrix is block-diagonal and q is, block by block and with the others fixed, a
minimal exponential family with log-partition A ([LSK20] Assumptions 1 to 3). Then the metric and
the curvature of a block are derivatives of A in that block alone, with no integral (Theorem 3):

    metric              F_i = D_i^2 A
    natural gradient    ghat_i = F_i^-1 grad_i L, the gradient in m_i = grad_i A
    curvature           Gamma_i = F_i^-1 1/2 D_i^3 A
    improved rule       lambda_i <- lambda_i - t ghat_i - (t^2/2) Gamma_i[ghat_i, ghat_i]

The last line is eq. our_iblr. D_i^3 A[ghat_i, ghat_i] is the second derivative of grad_i A along
one direction: two nested Jacobian-vector products, never a third-order tensor.

From a conditional log-partition. A mixture q(z) = E_w q(z | w) takes the metric of its joint
distribution. If q(z | w) is, block by block, a minimal exponential family with log-partition
A(lambda, w) ([LSK20] appendix I), then Theorem 4 says

    F_i = E_w[D_i^2 A],    Gamma_i = F_i^-1 1/2 E_w[D_i^3 A],    m_i = E_w[grad_i A]

which is Theorem 3 for the average E_w[A(lambda, w)], the distribution of w held fixed: `averaged`.

From a log density. In any parameterisation, with quadrature nodes of q for the expectations,

    F_ab = -E[d_ab log q]
    Gamma_d,ab = 1/2 E[(d_ab log q)(d_d log q) - (d_bd log q)(d_a log q)
                       - (d_ad log q)(d_b log q) - d_abd log q]                       eq. chris

and the second kind is Gamma^c_ab = F^cd Gamma_d,ab. The step of Song et al. (2018) contracts all of
it, the paper's (eq. ibrl_bc) only the entries whose three indices lie in one block; appendix A is
the case in which the first leaves the set of valid parameters.

A block is a vector, a scalar being a vector of length one. A symmetric matrix enters as its lower
triangle. That is a linear change of coordinates, under which the rule is invariant, but a gradient
in an off-diagonal coordinate is then twice the entry of the symmetric gradient matrix.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

Blocks = tuple[Float[Array, " _"], ...]
LogPartition = Callable[[Blocks], Float[Array, ""]]
LogProb = Callable[[Float[Array, "..."], Float[Array, " p"]], Float[Array, ""]]


def pack_symmetric(matrix: Float[Array, "d d"]) -> Float[Array, " k"]:
    """The lower triangle of a symmetric matrix, row by row, as a block of length d(d+1)/2."""
    return matrix[jnp.tril_indices(matrix.shape[0])]


def unpack_symmetric(block: Float[Array, " k"]) -> Float[Array, "d d"]:
    """The symmetric matrix of a lower triangle."""
    k = block.shape[0]
    d = (math.isqrt(8 * k + 1) - 1) // 2
    if d * (d + 1) // 2 != k:
        raise ValueError(
            f"`unpack_symmetric(block)` needs the lower triangle of a matrix, of length 1, 3, 6, "
            f"10, ..., but got {k} numbers."
        )
    lower = jnp.zeros((d, d), block.dtype).at[jnp.tril_indices(d)].set(block)
    return lower + jnp.tril(lower, -1).T


def fisher_block(log_partition: LogPartition, blocks: Blocks, index: int) -> Float[Array, "n n"]:
    """F_i = D_i^2 A, the Fisher matrix of one block, the others fixed (Theorem 3).

    Args:
        log_partition: A, a function of the tuple of blocks.
        blocks: lambda, one vector a block.
        index: i.
    """
    A_i = _of_block(log_partition, blocks, index)
    return jax.jacfwd(jax.grad(A_i))(blocks[index])


def natural_gradient(
    log_partition: LogPartition, blocks: Blocks, index: int, gradient: Float[Array, " n"]
) -> Float[Array, " n"]:
    """F_i^-1 g: the gradient in the block's expectation parameter m_i = grad_i A (Theorem 3).

    nan where F_i is not positive definite.

    Args:
        log_partition: A, a function of the tuple of blocks.
        blocks: lambda, one vector a block.
        index: i.
        gradient: g, the gradient of the loss in block i.
    """
    return _solve(fisher_block(log_partition, blocks, index), gradient)


def correction(
    log_partition: LogPartition, blocks: Blocks, index: int, direction: Float[Array, " n"]
) -> Float[Array, " n"]:
    """Gamma_i[ghat_i, ghat_i] of the second kind, the curvature term of one block.

    Args:
        log_partition: A, a function of the tuple of blocks.
        blocks: lambda, one vector a block.
        index: i.
        direction: ghat_i, the natural gradient in block i.
    """
    m_i = jax.grad(_of_block(log_partition, blocks, index))
    along = lambda x: jax.jvp(m_i, (x,), (direction,))[1]  # noqa: E731
    second = jax.jvp(along, (blocks[index],), (direction,))[1]
    return _solve(fisher_block(log_partition, blocks, index), 0.5 * second)


def averaged(
    log_partition: Callable[[Blocks, Array], Float[Array, ""]],
    nodes: Array,
    weights: Float[Array, " n"],
) -> LogPartition:
    """E_w[A(lambda, w)], the log-partition of a conditional exponential family (Theorem 4).

    Everything here that takes a log-partition takes it: its Fisher blocks are those of the joint
    distribution of z and w.

    Args:
        log_partition: A, a function of the tuple of blocks and of the mixing variable w.
        nodes: values of w: all of a discrete one, quadrature nodes of a continuous one.
        weights: their probabilities, summing to one.

    Example:
        >>> import jax.numpy as jnp
        >>> from iblr import geometry
        >>> A = lambda blocks, w: -jnp.log(w * blocks[0][0])        # z | w exponential, rate w r
        >>> A = geometry.averaged(A, jnp.array([1.0, 5.0]), jnp.array([0.5, 0.5]))
        >>> geometry.fisher_block(A, (jnp.array([2.0]),), 0).tolist()
        [[0.25]]
    """
    weights = jax.lax.stop_gradient(weights)
    return lambda blocks: weights @ jax.vmap(lambda w: log_partition(blocks, w))(nodes)


def improved_blocks(
    log_partition: LogPartition, blocks: Blocks, directions: Blocks, step_size: ArrayLike
) -> Blocks:
    """One step of the improved rule in every block at once, [LSK20] eq. our_iblr.

    Args:
        log_partition: A, a function of the tuple of blocks.
        blocks: lambda, one vector a block.
        directions: ghat, the natural gradient of every block.
        step_size: t.

    Example:
        >>> import jax.numpy as jnp
        >>> from iblr import geometry
        >>> log_partition = lambda blocks: -jnp.log(blocks[0][0])     # q(z) = r exp(-r z), r > 0
        >>> blocks = geometry.improved_blocks(log_partition, (jnp.ones(1),), (jnp.ones(1),), 4.0)
        >>> blocks[0].tolist()                                        # 1 - t would be -3
        [5.0]
    """

    def moved(i: int) -> Float[Array, " n"]:
        ghat, t = directions[i], jnp.asarray(step_size, blocks[i].dtype)
        return blocks[i] - t * ghat - 0.5 * t**2 * correction(log_partition, blocks, i, ghat)

    if len(directions) != len(blocks):
        raise ValueError(
            f"`improved_blocks(directions=...)` needs one direction a block, but got "
            f"{len(directions)} for {len(blocks)} blocks."
        )
    return tuple(moved(i) for i in range(len(blocks)))


def fisher(
    log_prob: LogProb,
    params: Float[Array, " p"],
    points: Float[Array, "n ..."],
    weights: Float[Array, " n"],
) -> Float[Array, "p p"]:
    """The whole Fisher matrix -E_q[d_ab log q], in any parameterisation.

    Args:
        log_prob: `log_prob(z, params)` of one point.
        params: lambda, flat.
        points: quadrature nodes of q at `params`, or draws from it.
        weights: the nodes' weights, summing to one; 1/n for draws.
    """
    hessian = jax.vmap(jax.hessian(log_prob, argnums=1), (0, None))(points, params)
    return -jnp.tensordot(weights, hessian, 1)


def christoffel(
    log_prob: LogProb,
    params: Float[Array, " p"],
    points: Float[Array, "n ..."],
    weights: Float[Array, " n"],
) -> Float[Array, "p p p"]:
    """Christoffel symbols of the first kind, Gamma_d,ab as [d, a, b], in any parameterisation.

    [LSK20] eq. chris, with a third-order tensor a point: for checks, not for fitting.

    Args:
        log_prob: `log_prob(z, params)` of one point.
        params: lambda, flat.
        points: quadrature nodes of q at `params`, or draws from it.
        weights: the nodes' weights, summing to one; 1/n for draws.
    """

    def derivatives(z: Float[Array, "..."]) -> tuple[Array, Array, Array]:
        first = jax.grad(lambda x: log_prob(z, x))
        second = jax.jacfwd(first)
        return first(params), second(params), jax.jacfwd(second)(params)

    D1, D2, D3 = jax.vmap(derivatives)(points)
    E = lambda indices: jnp.einsum(indices, weights, D2, D1)  # noqa: E731
    products = E("n,nab,nd->dab") - E("n,nbd,na->dab") - E("n,nad,nb->dab")
    return 0.5 * (products - jnp.tensordot(weights, D3, 1))


def raise_index(
    metric: Float[Array, "p p"], symbols: Float[Array, "p p p"]
) -> Float[Array, "p p p"]:
    """The second kind Gamma^c_ab = F^cd Gamma_d,ab as [c, a, b], from the first kind."""
    return _solve(metric, symbols.reshape(len(metric), -1)).reshape(symbols.shape)


def second_order_step(
    symbols: Float[Array, "p p p"],
    params: Float[Array, " p"],
    direction: Float[Array, " p"],
    step_size: ArrayLike,
    blocks: Sequence[Sequence[int]] | None = None,
) -> Float[Array, " p"]:
    """One second-order step along a geodesic, in any parameterisation.

    Args:
        symbols: Christoffel symbols of the second kind at `params`, as [c, a, b].
        params: lambda, flat.
        direction: ghat, the natural gradient in `params`.
        step_size: t.
        blocks: the coordinates of every block, each coordinate in one of them. The Fisher matrix
            must be block-diagonal in them; the step is then the paper's (eq. ibrl_bc). None takes
            all coordinates together, the step of Song et al. (2018), which no theorem keeps inside
            the set.
    """
    if blocks is not None:
        symbols = _within(symbols, blocks)
    t = jnp.asarray(step_size, params.dtype)
    curvature = jnp.einsum("cab,a,b->c", symbols, direction, direction)
    return params - t * direction - 0.5 * t**2 * curvature


def _within(
    symbols: Float[Array, "p p p"], blocks: Sequence[Sequence[int]]
) -> Float[Array, "p p p"]:
    """The symbols with all entries whose three indices are not in one block set to zero."""
    p = symbols.shape[0]
    if sorted(index for block in blocks for index in block) != list(range(p)):
        raise ValueError(
            f"`second_order_step(blocks=...)` needs every coordinate from 0 to {p - 1} in exactly "
            f"one block, but got {blocks!r}."
        )
    label = {index: number for number, block in enumerate(blocks) for index in block}
    labels = jnp.array([label[index] for index in range(p)])
    same = labels[:, None] == labels
    return jnp.where(same[:, :, None] & same[:, None, :], symbols, 0)


def _of_block(
    log_partition: LogPartition, blocks: Blocks, index: int
) -> Callable[[Float[Array, " n"]], Float[Array, ""]]:
    """A as a function of block i, the others fixed."""

    def A_i(block: Float[Array, " n"]) -> Float[Array, ""]:
        moved = list(blocks)
        moved[index] = block
        return log_partition(tuple(moved))

    return A_i


def _solve(metric: Float[Array, "n n"], right: Float[Array, "n *m"]) -> Float[Array, "n *m"]:
    """F^-1 times a vector or the columns of a matrix; nan where F is not positive definite."""
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(metric), right)
