"""Encoders: modules that map examples to the vectors that a head scores."""

from manyclass.encoders.complex import ComplEx as ComplEx
from manyclass.encoders.divided import DividedEmbedding as DividedEmbedding
from manyclass.encoders.features import FeatureBag as FeatureBag
from manyclass.encoders.features import FeatureEncoder as FeatureEncoder
from manyclass.encoders.recurrent import Recurrent as Recurrent
