"""The norms as objects that hold their parameters."""

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ._api import layer_norm, layer_norm_backward, rms_norm, rms_norm_backward
from ._api.common import Axis, GradientsOut, Mask
from ._checks import (
    check_layer_input,
    checked_normalized_shape,
    checked_parameter_dtype,
    device_array,
)
from ._results import Array, LayerNormResult, NormGradients, RMSNormResult


class _Norm:
    """What both layers share: parameters over the trailing axes."""

    def __init__(
        self,
        normalized_shape: Axis,
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        dtype: DTypeLike,
    ) -> None:
        self.normalized_shape = checked_normalized_shape(normalized_shape)
        self.eps: Any = eps
        self.elementwise_affine = bool(elementwise_affine)
        self._dtype = checked_parameter_dtype(dtype)
        self.weight: Array | None = None
        self.bias: Array | None = None
        if self.elementwise_affine:
            self.weight = np.empty(self.normalized_shape, self._dtype)
            if bias:
                self.bias = np.empty(self.normalized_shape, self._dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones and the bias to zeros, in new NumPy arrays of the dtypes that they have.

        Arrays on a CUDA device raise TypeError: fill them there, or assign None or others first.
        """
        for name in ("weight", "bias"):
            if device_array(name, getattr(self, name)) is not None:
                raise TypeError(
                    f"`{name}` is on a CUDA device, where `reset_parameters` makes no arrays; got a "
                    f"{type(getattr(self, name)).__name__}: fill it there, or assign a NumPy array"
                )
        if self.weight is not None:
            self.weight = np.ones(self.normalized_shape, self._dtype_of(self.weight))
        if self.bias is not None:
            self.bias = np.zeros(self.normalized_shape, self._dtype_of(self.bias))

    def _dtype_of(self, parameter: Any) -> np.dtype[Any]:
        """The dtype of an array; the layer's for anything else that was assigned."""
        return parameter.dtype if isinstance(parameter, np.ndarray) else self._dtype

    def _axes(self, x: Any) -> Axis:
        check_layer_input(x, self.normalized_shape)
        count = len(self.normalized_shape)
        return -1 if count == 1 else tuple(range(-count, 0))

    def _mask(self) -> Mask:
        return True, self.weight is not None, self.bias is not None

    def __repr__(self) -> str:
        weight: Any = device_array("weight", self.weight)
        if weight is None and self.weight is not None:
            weight = self.weight if hasattr(self.weight, "dtype") else np.asarray(self.weight)
        dtype = "" if weight is None else f", dtype={weight.dtype.name}"
        return (
            f"{type(self).__name__}({self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}{dtype})"
        )


class LayerNorm(_Norm):
    """Layer normalization over the trailing axes, with its parameters.

    Parameters
    ----------
    normalized_shape : int or tuple of int
        The lengths of the trailing axes to normalize over.
    eps : float, default 1e-5
        Added to the variance.
    elementwise_affine : bool, default True
        Whether there is a weight, and a bias if `bias` says so.
    bias : bool, default True
        Whether there is a bias beside the weight.
    dtype : dtype, default float32
        The dtype of new parameters.

    Attributes
    ----------
    weight, bias : ndarray or None
        Plain arrays of shape `normalized_shape` (ones and zeros at first). Assign a checkpoint's to
        them, of any supported dtype, or arrays on a CUDA device: they are checked when the layer is called.

    Raises
    ------
    TypeError, ValueError
        If `normalized_shape` is not an int or a non-empty tuple of ints that are not negative, or
        `dtype` is not supported.

    See Also
    --------
    layer_norm : the function.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> layer = npnorm.LayerNorm(4)
    >>> layer
    LayerNorm((4,), eps=1e-05, elementwise_affine=True, bias=True, dtype=float32)
    >>> layer.weight = np.array([1, 1, 2, 2], np.float32)
    >>> layer(np.array([[2, -1, 3, 0]], np.float32)).round(4)
    array([[ 0.6325, -1.2649,  2.5298, -1.2649]], dtype=float32)
    """

    def __init__(
        self,
        normalized_shape: Axis,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, dtype)

    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: Literal[False] = ..., stream: Any = ...
    ) -> Array: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: Literal[True], stream: Any = ...
    ) -> LayerNormResult: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: bool, stream: Any = ...
    ) -> Array | LayerNormResult: ...
    def __call__(
        self, x: ArrayLike, *, out: Array | None = None, return_stats: bool = False, stream: Any = None
    ) -> Array | LayerNormResult:
        """`layer_norm` of `x` with this layer's parameters."""
        return layer_norm(
            x,
            self.weight,
            self.bias,
            axis=self._axes(x),
            eps=self.eps,
            out=out,
            return_stats=return_stats,
            stream=stream,
        )

    def backward(
        self,
        dy: ArrayLike,
        x: ArrayLike,
        *,
        mean: ArrayLike | None = None,
        rstd: ArrayLike | None = None,
        dresidual: ArrayLike | None = None,
        output_mask: Mask | None = None,
        out: GradientsOut | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> NormGradients:
        """`layer_norm_backward` with this layer's parameters; by default dbias is None where there is no bias."""
        return layer_norm_backward(
            dy,
            x,
            self.weight,
            mean=mean,
            rstd=rstd,
            axis=self._axes(x),
            eps=self.eps,
            dresidual=dresidual,
            output_mask=self._mask() if output_mask is None else output_mask,
            out=out,
            stream=stream,
            workspace=workspace,
        )


class RMSNorm(_Norm):
    """Root mean square normalization over the trailing axes, with its parameters.

    Parameters
    ----------
    normalized_shape : int or tuple of int
        The lengths of the trailing axes to normalize over.
    eps : float or None, default 1e-6
        Added to the mean square. None is the machine epsilon of x's compute dtype.
    elementwise_affine : bool, default True
        Whether there is a weight, and a bias if `bias` says so.
    bias : bool, default False
        Whether there is a bias beside the weight.
    dtype : dtype, default float32
        The dtype of new parameters.

    Attributes
    ----------
    weight, bias : ndarray or None
        Plain arrays of shape `normalized_shape` (ones and zeros at first). Assign a checkpoint's to
        them, of any supported dtype, or arrays on a CUDA device: they are checked when the layer is called.

    Raises
    ------
    TypeError, ValueError
        If `normalized_shape` is not an int or a non-empty tuple of ints that are not negative, or
        `dtype` is not supported.

    See Also
    --------
    rms_norm : the function.

    Examples
    --------
    >>> import numpy as np
    >>> import npnorm
    >>> layer = npnorm.RMSNorm(3)
    >>> layer
    RMSNorm((3,), eps=1e-06, elementwise_affine=True, bias=False, dtype=float32)
    >>> layer(np.array([3, 4, 5], np.float32)).round(4)
    array([0.7348, 0.9798, 1.2247], dtype=float32)
    """

    def __init__(
        self,
        normalized_shape: Axis,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, dtype)

    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: Literal[False] = ..., stream: Any = ...
    ) -> Array: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: Literal[True], stream: Any = ...
    ) -> RMSNormResult: ...
    @overload
    def __call__(
        self, x: ArrayLike, *, out: Array | None = ..., return_stats: bool, stream: Any = ...
    ) -> Array | RMSNormResult: ...
    def __call__(
        self, x: ArrayLike, *, out: Array | None = None, return_stats: bool = False, stream: Any = None
    ) -> Array | RMSNormResult:
        """`rms_norm` of `x` with this layer's parameters."""
        return rms_norm(
            x,
            self.weight,
            self.bias,
            axis=self._axes(x),
            eps=self.eps,
            out=out,
            return_stats=return_stats,
            stream=stream,
        )

    def backward(
        self,
        dy: ArrayLike,
        x: ArrayLike,
        *,
        rstd: ArrayLike | None = None,
        dresidual: ArrayLike | None = None,
        output_mask: Mask | None = None,
        out: GradientsOut | None = None,
        stream: Any = None,
        workspace: Any = None,
    ) -> NormGradients:
        """`rms_norm_backward` with this layer's parameters; by default dbias is None where there is no bias."""
        return rms_norm_backward(
            dy,
            x,
            self.weight,
            rstd=rstd,
            axis=self._axes(x),
            eps=self.eps,
            dresidual=dresidual,
            output_mask=self._mask() if output_mask is None else output_mask,
            out=out,
            stream=stream,
            workspace=workspace,
        )
