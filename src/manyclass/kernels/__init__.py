"""Kernels: scores and losses of a draw or of all classes, by eager references and by gradients in closed form."""

from manyclass.kernels.closed_form import closed_form_loss as closed_form_loss
from manyclass.kernels.closed_form import has_closed_form as has_closed_form
from manyclass.kernels.draw import LinearDraw as LinearDraw
from manyclass.kernels.eager import at_least_float32 as at_least_float32
from manyclass.kernels.eager import directions as directions
from manyclass.kernels.eager import eager_cross_entropy as eager_cross_entropy
from manyclass.kernels.eager import eager_loss as eager_loss
from manyclass.kernels.eager import exclude_hits as exclude_hits
from manyclass.kernels.eager import linear_scores as linear_scores
from manyclass.kernels.eager import mask_columns as mask_columns
from manyclass.kernels.exact import EXACT_WAYS as EXACT_WAYS
from manyclass.kernels.exact import available_ways as available_ways
from manyclass.kernels.exact import default_way as default_way
from manyclass.kernels.exact import exact_cross_entropy as exact_cross_entropy
from manyclass.kernels.fastest import fastest_way as fastest_way
from manyclass.kernels.impl import IMPLS as IMPLS
from manyclass.kernels.impl import implementation as implementation
from manyclass.kernels.impl import runs_triton as runs_triton
from manyclass.kernels.seconds import seconds_of as seconds_of
