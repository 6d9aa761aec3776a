"""What a run reads: the sources of its data, by their place in the config, how a mixture shares samples out among them,
and whether they fit the training.

Read by the checks of a run's config and by jobs.data.mixture. What a token file is, is in tokens; none is opened here.
"""
import dataclasses
import math
from fractions import Fraction
from pathlib import Path

from jobs.spec.load import Problem
from jobs.spec.tokens import TEXT_VOCABULARY, TokensInfo, is_token_file, num_sequences
from jobs.spec.training import DataSpec, SourceSpec, TrainingSpec

LONGEST_PERIOD = 2**16  # samples after which the order of a mixture's sources repeats
TRAINED, VALIDATED = "data", "training.validation.data"  # places in the config of what a run reads


def all_data(data: DataSpec | None, training: TrainingSpec | None) -> dict[str, DataSpec]:
    """What a run reads, by its place in the config."""
    validation = training and training.validation
    found = {TRAINED: data, VALIDATED: validation and validation.data}
    return {at: one for at, one in found.items() if one is not None}


def named_sources(datasets: dict[str, DataSpec]) -> list[tuple[str, SourceSpec]]:
    """Each source with its place in the config."""
    return [(at if data.path is not None else f"{at}.sources[{i}]", source)
            for at, data in datasets.items() for i, source in enumerate(data.all_sources)]


def with_token_files(data: DataSpec, folder: Path, *, at: str = TRAINED) -> DataSpec:
    """`data`, of this place, as the ranks read it: what is text lies tokenized in `folder`."""
    name = "tokens" if at == TRAINED else "validation"
    sources = [source if is_token_file(source.path) else
               dataclasses.replace(source, path=str(folder / f"{name}-{i}.bin"))
               for i, source in enumerate(data.all_sources)]
    return dataclasses.replace(data, path=None, sources=sources)


def whole_shares(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Weights as whole numbers of samples out of their sum, at most LONGEST_PERIOD: as they were written where that is
    possible, else rounded. Raises ValueError with the number of a source that would get nothing."""
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    exact = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in exact))
    if period > LONGEST_PERIOD:
        period = LONGEST_PERIOD
        for i, share in enumerate(exact):
            if round(share * period) == 0:
                raise ValueError(i)
    counts = [round(share * period) for share in exact]
    counts[counts.index(max(counts))] += period - sum(counts)
    return tuple(counts)


def fit_problems(datasets: dict[str, DataSpec], infos: dict[str, TokensInfo | None], *, vocab_size: int,
                 training: TrainingSpec) -> list[Problem]:
    """What is wrong between sources and training. `infos` by the source's place in the config; None: text that is not
    tokenized yet, of which only the vocabulary is known."""
    found = _foreign_tokens(datasets, infos)
    for at, data in datasets.items():
        counts = whole_shares(tuple(source.weight for source in data.all_sources))
        for (where, source), count in zip(named_sources({at: data}), counts):
            info = infos[where]
            vocabulary = TEXT_VOCABULARY if info is None else info.vocab_size
            if vocabulary is not None and vocabulary > vocab_size:
                found.append(Problem(where="model.vocab_size", value=vocab_size, message=f"is below the vocabulary of "
                                     f"{vocabulary:,} tokens of {source.path}; raise it, or tokenize otherwise"))
            if info is None:
                continue
            share = Fraction(count, sum(counts))
            if problem := (_too_short(where, source, info, training) or
                           _too_often(at, data, source, info, training, share=share)):
                found.append(problem)
    return found


def _too_short(where: str, source: SourceSpec, info: TokensInfo, training: TrainingSpec) -> Problem | None:
    if num_sequences(info, seq_len=training.seq_len) >= 1:
        return None
    return Problem(where=f"{where}.path", value=source.path, message=f"holds {info.num_tokens:,} tokens, less than one "
                   f"sequence: training.seq_len={training.seq_len} needs one more than itself; shorten it, or give "
                   "more data")


def _too_often(at: str, data: DataSpec, source: SourceSpec, info: TokensInfo, training: TrainingSpec, *,
               share: Fraction) -> Problem | None:
    """`share`: of the source in all samples."""
    held, size = num_sequences(info, seq_len=training.seq_len), training.global_batch_size
    steps, asked = training.steps, f"training.steps={training.steps}"
    if at == VALIDATED:
        steps = training.validation.batches
        asked, wanted = f"training.validation.batches={steps}", math.ceil(steps * size * share)
        if wanted > held:
            fit = int(held / share) // size
            return Problem(where="training.validation.batches", value=steps, message=f"of {size} sequences of "
                           f"{training.seq_len} tokens take {wanted:,} sequences of {source.path}, which holds "
                           f"{held:,} ({info.num_tokens:,} tokens); {f'try {fit}, or ' if fit else ''}give more data")
    if data.max_epochs is not None and (epochs := float(steps * size * share / held)) > data.max_epochs:
        return Problem(where=f"{at}.max_epochs", value=data.max_epochs, message=f"is less than the {epochs:.2f} epochs "
                       f"of {source.path} that {asked} take; raise it, take fewer, or give the source less weight")
    return None


def _foreign_tokens(datasets: dict[str, DataSpec], infos: dict[str, TokensInfo | None]) -> list[Problem]:
    """Sources whose tokens mean something else than the first one's. Of a file that does not say, nothing is known."""
    named = named_sources(datasets)
    tokenizers = {where: "bytes" if infos[where] is None else infos[where].tokenizer for where, _ in named}
    first = next(filter(None, tokenizers.values()), None)
    return [Problem(where=f"{where}.path", value=source.path, message=f"is made with another tokenizer "
                    f"({tokenizers[where]}) than the sources before it ({first}): the same number would mean different "
                    "text; tokenize all of them with one")
            for where, source in named if tokenizers[where] not in (None, first)]
