"""Boxes of a tensor: where a slice of the flattened tensor lies in the tensor's own dimensions.

Data-parallel ranks split the optimizer's flat buffers without regard to parameters. A checkpoint names every part by its place in the
parameter, so that any other layout finds what it needs. Nothing here knows of torch.
"""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offsets and the sizes of a box, one of each a dimension."""


def boxes_of_interval(start: int, stop: int, shape: Sequence[int]) -> list[Box]:
    """Returns boxes that hold exactly the elements ``start`` to ``stop`` of a tensor in row-major order.

    They are disjoint, in that order, and each one's elements follow one another. There are at most two for each dimension, less one.

    Args:
        start, stop: elements, within those of ``shape``. shape: of the tensor.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    rest = tuple(shape[1:])
    inner = prod(rest)
    first, last = -(-start // inner), stop // inner  # the whole rows in between
    if first > last:  # the interval lies within one row
        return [_under(first - 1, box) for box in boxes_of_interval(start % inner, (stop - 1) % inner + 1, rest)]
    found: list[Box] = []
    if start % inner:
        found += [_under(first - 1, box) for box in boxes_of_interval(start % inner, inner, rest)]
    if first < last:
        found.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    if stop % inner:
        found += [_under(last, box) for box in boxes_of_interval(0, stop % inner, rest)]
    return found


def _under(row: int, box: Box) -> Box:
    return (row, *box[0]), (1, *box[1])


def elements_before(position: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns how many elements of a view lie before ``position``, counted in elements from the view's first.

    Args:
        strides: of the view, each at least as long as all that the dimensions behind it span.
    """
    count, left = 0, position
    for dimension, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if left <= 0:
            break
        innermost = dimension == len(shape) - 1
        whole = min(-(-left // stride) if innermost else left // stride, size)
        count += whole * prod(shape[dimension + 1 :])
        if whole == size:
            break
        left -= whole * stride
    return count


def is_ordered(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Returns whether a view's elements lie in memory in row-major order, with or without gaps."""
    spans = [(size - 1) * stride + 1 for size, stride in zip(shape, strides, strict=True)]
    inner = [1 + sum(span - 1 for span in spans[index + 1 :]) for index in range(len(spans))]
    return all(stride >= behind for size, stride, behind in zip(shape, strides, inner, strict=True) if size > 1)


def pieces(shape: Sequence[int], itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Yields boxes of at most ``most_bytes`` that make up a tensor, cut along its first dimension that has more than one element.

    They depend on nothing but the shape: replicas are cut alike. A single row may be larger.
    """
    cut = next((index for index, size in enumerate(shape) if size > 1), None)
    whole = tuple(0 for _ in shape), tuple(shape)
    if cut is None or prod(shape) * itemsize <= most_bytes:
        yield whole
        return
    rows = max(1, most_bytes // (prod(shape[cut + 1 :]) * itemsize))
    for start in range(0, shape[cut], rows):
        size = min(rows, shape[cut] - start)
        yield (
            tuple(start if index == cut else 0 for index in range(len(shape))),
            tuple(size if index == cut else length for index, length in enumerate(shape)),
        )


def overlap(first: Box, second: Box) -> bool:
    """Returns whether two boxes of a tensor have an element in common."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(*first, *second, strict=True))
