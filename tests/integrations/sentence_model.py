"""A tiny sentence embedding model, texts for it, and the loss of in-batch negatives as plain loops."""

import copy
import functools
import tempfile

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings", "fast", "well", "today"]
ANCHORS = ["red cat", "green dog runs", "blue bird sings well today", "cat", "dog sleeps fast"]
POSITIVES = ["cat runs", "dog sleeps", "bird sings", "blue cat sleeps", "dog today"]
NEGATIVES = ["bird", "cat sings today", "red dog", "green bird sings", "fast"]
COUNTS = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0, 3.0, 1.0])
SCALE = 20.0


def tiny_model():
    """Return a new copy of a transformer of one layer, without dropout."""
    return copy.deepcopy(_tiny_model())


@functools.cache
def _tiny_model():
    tokenizer = word_tokenizer(["[PAD]", "[UNK]", *WORDS])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    # Transformer reads a model and its tokenizer from a folder.
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
            folder
        )
        BertModel(config).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")


def static_model():
    """Return a model that is the mean of word vectors."""
    return SentenceTransformer(
        modules=[StaticEmbedding(word_tokenizer(["[UNK]", *WORDS]), embedding_dim=8)], device="cpu"
    )


def word_tokenizer(words):
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


def inputs(model, *columns):
    return [dict(model.preprocess(column)) for column in columns]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def embeddings(batch, columns, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 4, dtype=dtype, generator=generator).requires_grad_() for _ in range(columns)]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


SIMILARITIES = {
    "cosine": lambda a, b: dot(a, b) / (dot(a, a) ** 0.5 * dot(b, b) ** 0.5),
    "dot": dot,
    "euclidean": lambda a, b: -(dot(a - b, a - b) ** 0.5),
    "manhattan": lambda a, b: -sum(abs(x - y) for x, y in zip(a, b, strict=True)),
}


def loss_by_loops(columns, ids, counts, similarity="cosine", scale=SCALE):
    """Return the mean loss as its formula says, one term at a time."""
    anchors, positives, *negatives = columns
    batch, total = len(ids), 0
    for i, (target, *own) in enumerate(ids):
        explicit = {target}
        score = scale * SIMILARITIES[similarity](anchors[i], positives[i])
        z = score.exp()
        for negative, c in zip(negatives, own, strict=True):
            if c >= 0 and c not in explicit:
                explicit.add(c)
                z = z + (scale * SIMILARITIES[similarity](anchors[i], negative[i])).exp()
        for j, (c, *_) in enumerate(ids):
            if j != i and c not in explicit:
                kappa = 1 / ((batch - 1) * counts[c] / sum(counts))
                z = z + kappa * (scale * SIMILARITIES[similarity](anchors[i], positives[j])).exp()
        total = total + z.log() - score
    return total / batch
