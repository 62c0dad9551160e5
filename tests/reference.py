"""Slow, obvious twins of what the product computes quickly, and a drafter that knows some of the answers."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.drafter import Budget, Committed, Drafter, FeatureBatch
from models.sampling import Draw, Sampling, Voice
from models.tree import Path, TokenTree, parents_of

Outcome = TypeVar("Outcome")


def way_up(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def mask_by_walking(parents: Sequence[int]) -> list[list[bool]]:
    """Who sees whom, by walking up from every node."""
    return [[other in way_up(parents, node) for other in range(len(parents))] for node in range(len(parents))]


def greedy_by_walking(
    tokens: Sequence[int], parents: Sequence[int], valid: Sequence[bool], choices: Sequence[int]
) -> tuple[list[int], int]:
    """The first of the longest paths on which every token is the target's choice after its parent, and the choice after it."""
    best = [0]
    for node in range(len(tokens)):
        path = way_up(parents, node)
        right = all(valid[child] and tokens[child] == choices[parent] for parent, child in itertools.pairwise(path))
        if right and len(path) > len(best):
            best = path
    return best, choices[best[-1]]


def sampled_by_walking(
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    target_probs: Sequence[Sequence[float]],
    draft_probs: Sequence[Sequence[float]] | None,
    draw: Draw,
    renormalise: bool = True,
    replace: bool = False,
) -> tuple[list[int], int]:
    """Recursive rejection, child by child; the two switches break it: see tests/faults.py."""
    path, vocabulary = [0], range(len(target_probs[0]))
    while True:
        left = list(target_probs[path[-1]])
        guess = None if draft_probs is None else list(draft_probs[path[-1]])
        for child in [node for node, parent in enumerate(parents) if parent == path[-1] and valid[node]]:
            token = tokens[child]
            odds = left[token] / (sum(left) if renormalise else 1.0)
            if guess is not None:
                if not guess[token]:
                    continue
                odds = min(1.0, odds * sum(guess) / guess[token])
            if draw(torch.tensor([1 - odds, odds], dtype=torch.float64)):
                path.append(child)
                break
            if guess is None:
                left[token] = left[token] if replace else 0.0
            else:
                total, mass = sum(left) if renormalise else 1.0, sum(guess)
                excess = [max(left[other] / total - guess[other] / mass, 0.0) for other in vocabulary]
                left = excess if sum(excess) else left
                guess[token] = guess[token] if replace else 0.0
        else:
            return path, draw(torch.tensor(left, dtype=torch.float64))


def typical_by_walking(
    tokens: Sequence[int],
    parents: Sequence[int],
    valid: Sequence[bool],
    target_probs: Sequence[Sequence[float]],
    epsilon: float,
    delta: float,
) -> list[int]:
    """Of all paths of typical guesses the longest, then the likeliest, then the first."""

    def stands(parent: int, child: int) -> bool:
        probs = target_probs[parent]
        entropy = -sum(prob * math.log(prob) for prob in probs if prob)
        return valid[child] and probs[tokens[child]] > min(epsilon, delta * math.exp(-entropy))

    paths = [way_up(parents, node) for node in range(len(tokens))]
    typical = [path for path in paths if all(stands(*edge) for edge in itertools.pairwise(path))]
    longest = [path for path in typical if len(path) == max(map(len, typical))]
    return max(
        longest,
        key=lambda path: sum(math.log(target_probs[above][tokens[node]]) for above, node in itertools.pairwise(path)),
    )


def worth(ranks: Sequence[Sequence[int]], paths: Sequence[Sequence[int]]) -> int:
    """Guesses that a tree of `paths` would have got accepted on the text where `ranks` were seen."""
    return sum(
        tuple(row[:length]) in {tuple(path) for path in paths} for row in ranks for length in range(1, len(row) + 1)
    )


def most_worth(ranks: Sequence[Sequence[int]], width: int, nodes: int) -> int:
    """The most that any tree of `nodes` nodes, root included, is worth: all of them are tried."""
    every = [path for length in range(1, len(ranks[0]) + 1) for path in itertools.product(range(width), repeat=length)]
    trees = (set(chosen) for chosen in itertools.combinations(every, nodes - 1))
    return max(worth(ranks, list(tree)) for tree in trees if all(len(path) == 1 or path[:-1] in tree for path in tree))


def grown_by_replaying(turns: Sequence[Sequence[Sequence[int]]], width: int, nodes: int) -> list[Path]:
    """A tree node by node: with the tree so far every text is decoded, and of all nodes that could be added the one is
    taken that the most rounds would have gone on to.
    """
    tree: list[Path] = []
    while len(tree) < nodes - 1:
        ended = []  # the path that each round accepted, and the ranks where it began
        for turn in turns:
            at = 0
            while at < len(turn):
                accepted = max((p for p in [(), *tree] if tuple(turn[at][: len(p)]) == p), key=len)
                ended.append((accepted, turn[at]))
                at += len(accepted) + 1
        may = [(*above, rank) for above in [(), *tree] if len(above) < len(turns[0][0]) for rank in range(width)]
        gains = {
            path: sum(path[:-1] == above and tuple(row[: len(path)]) == path for above, row in ended)
            for path in may
            if path not in tree
        }
        tree.append(min(gains, key=lambda path: (-gains[path], len(path), path)))
    return tree


def likeliest(rates: Sequence[Sequence[float]], nodes: int) -> float:
    """The largest sum of products of `rates` that a tree of `nodes` nodes, root included, can have: all are tried."""
    width = range(len(rates[0]))
    every = [path for length in range(1, len(rates) + 1) for path in itertools.product(width, repeat=length)]
    trees = (set(chosen) for chosen in itertools.combinations(every, nodes - 1))
    return max(
        sum(math.prod(rates[k][rank] for k, rank in enumerate(path)) for path in tree)
        for tree in trees
        if all(len(path) == 1 or path[:-1] in tree for path in tree)
    )


def marked_batch(
    documents: Sequence[str], spoken: Sequence[str], vocabulary: int, width: int, taps: int, seed: int
) -> FeatureBatch:
    """A random batch drawn by hand: whose document each token is, - for padding, and an x where the target speaks."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(documents), len(documents[0])
    return FeatureBatch(
        torch.randint(0, vocabulary, shape, generator=generator),
        torch.tensor([[mark == "x" for mark in row] for row in spoken]),
        torch.tensor([[-1 if mark == "-" else int(mark) for mark in row] for row in documents]),
        torch.tensor([[at - row.index(mark) for at, mark in enumerate(row)] for row in documents]),
        torch.randn(*shape, taps * width, generator=generator),
        torch.randn(*shape, width, generator=generator),
    )


def eagle_by_hand(weights: Mapping[str, Tensor], config: LlamaConfig, read: Tensor) -> Tensor:
    """EAGLE-1's foretold states [T, D] of one text, whose embeddings and states are `read` [T, 2 * D]: transformers' own
    Llama layer without the norm before attention."""
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(
        {name.removeprefix("layers.0."): value for name, value in weights.items() if name.startswith("layers.0.")}
    )
    fused = read @ weights["fc.weight"].T + weights.get("fc.bias", 0)
    position = torch.arange(len(read))[None]
    mask = torch.full((1, 1, len(read), len(read)), -torch.inf).triu(1)
    turns = LlamaRotaryEmbedding(config)(fused[None], position)
    return layer(fused[None], attention_mask=mask, position_ids=position, position_embeddings=turns)[0]


def smooth_l1_by_hand(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The mean over entries of half the squared difference up to 1, and of the difference less a half from there on."""
    apart = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    return sum(0.5 * gap**2 if gap < 1 else gap - 0.5 for gap in apart) / len(apart)


def probs_by_hand(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """The distribution that `logits` mean under `sampling`, one token after the other."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.temperature == 0:
        return [float(token == order[0]) for token in range(len(logits))]
    weights = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
    kept = order[: sampling.top_k or None]
    total = sum(weights[token] for token in kept)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass < sampling.top_p:
            nucleus.append(token)
        mass += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(logits))]


def outcomes(run: Callable[[Draw], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """Everything that `run` can return and how likely: it runs once for each way in which its draws can fall."""
    waiting: list[list[int]] = [[]]
    while waiting:
        script = waiting.pop()
        chance: list[float] = []

        def draw(weights: Tensor, script: list[int] = script, chance: list[float] = chance) -> int:
            probs = (weights.double() / weights.double().sum()).tolist()
            if len(chance) == len(script):
                possible = [
                    index for index, prob in enumerate(probs) if not prob < 1e-13
                ]  # below is rounding; nan stays, and shows
                waiting.extend([*script, index] for index in possible[1:])
                script.append(possible[0])
            picked = script[len(chance)]
            chance.append(probs[picked])
            return picked

        yield run(draw), math.prod(chance)


@torch.inference_mode()
def read_paths(model: PreTrainedModel, text: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    """[N, V] the logits after every node: for each a plain pass, without a cache, over `text` and the path to the node."""
    inputs = [torch.tensor([text + [tokens[step] for step in way_up(parents, node)]]) for node in range(len(tokens))]
    return torch.stack([model(input_ids=ids, use_cache=False).logits[0, -1] for ids in inputs])


@torch.inference_mode()
def plain_greedy(model: PreTrainedModel, prompt: list[int], limit: int, ends: frozenset[int]) -> list[int]:
    """Up to `limit` tokens after `prompt`, each by a full pass over everything before it."""
    text = list(prompt)
    while len(text) < len(prompt) + limit and (len(text) == len(prompt) or text[-1] not in ends):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]


def hydra_by_hand(drafter: Any, hidden: Tensor, position: int, tokens: Sequence[int]) -> Tensor:
    """[V] logits of the head that foretells what follows `tokens`, the first of which stands behind `hidden` [position + 1, D].

    From the formulas of the paper and its Hydra++ layer, for one node, with neither cache nor batch.
    """
    state, ends = hidden[position], drafter.ends
    if drafter.prefix is not None:
        state = prefix_by_hand(drafter.prefix, hidden, position)
    read = [state]
    for token in tokens:
        embedding = ends.embedding[token]
        read.append(embedding / embedding.square().mean().sqrt())
    first, *rest = drafter.blocks[len(tokens) - 1]
    inner = first.linear.weight @ torch.cat(read) + first.linear.bias
    state = state + inner * torch.sigmoid(inner)
    for layer in rest:
        inner = layer.linear.weight @ state + layer.linear.bias
        state = state + inner * torch.sigmoid(inner)
    ids = slice(None) if drafter.draft_ids is None else drafter.draft_ids
    own = drafter.lm_heads[len(tokens) - 1].weight if len(drafter.lm_heads) else ends.head[ids]
    return own @ state


def prefix_by_hand(layer: Any, hidden: Tensor, position: int) -> Tensor:
    """[D] what a decoder layer makes of `hidden` [T, D] at `position`: head by head, key by key."""

    def normed(norm: Any, state: Tensor) -> Tensor:
        return state / (state.square().mean() + norm.eps).sqrt() * norm.weight

    attention, width = layer.self_attn, layer.self_attn.width

    def turned(vector: Tensor, at: int) -> Tensor:
        half = width // 2
        angle = at * attention.rotary.frequencies[half:]
        low, high = vector[:half], vector[half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()])

    read = [normed(layer.input_layernorm, state) for state in hidden[: position + 1]]
    asked = (attention.q_proj.weight @ read[position]).split(width)
    keys = [(attention.k_proj.weight @ state).split(width) for state in read]
    values = [(attention.v_proj.weight @ state).split(width) for state in read]
    shared, found = len(asked) // len(keys[0]), []
    for head, query in enumerate(asked):
        group = head // shared
        scores = [turned(query, position) @ turned(key[group], at) / width**0.5 for at, key in enumerate(keys)]
        weights = torch.stack(scores).softmax(0)
        found.append(sum(weight * value[group] for weight, value in zip(weights, values, strict=True)))
    state = hidden[position] + attention.o_proj.weight @ torch.cat(found)
    inner, mlp = normed(layer.post_attention_layernorm, state), layer.mlp
    gate = mlp.gate_proj.weight @ inner
    return state + mlp.down_proj.weight @ (gate * torch.sigmoid(gate) * (mlp.up_proj.weight @ inner))


Proposal = tuple[list[int], list[int], list[bool]]  # tokens, parents, valid


def rounds_by_reading(text: list[int], proposals: Sequence[Proposal]) -> tuple[list[int], list[int], list[int]]:
    """Accepted, offered and committed of every round, from the finished text and what was proposed."""
    accepted, offered, committed = [], [], []
    at = 1  # the first token was said by the prefill
    for tokens, parents, valid in proposals:
        rest = text[at:]
        follows = {0: 0}  # node -> how many tokens of the text the path to it spells
        for node in range(1, len(tokens)):
            above = follows.get(parents[node])
            if valid[node] and above is not None and above < len(rest) and tokens[node] == rest[above]:
                follows[node] = above + 1
        last = max(follows, key=lambda node: (follows[node], -node))
        tried = any(valid[node] and parents[node] == last for node in range(1, len(tokens)))
        accepted.append(follows[last])
        offered.append(min(follows[last] + tried, len(rest)))
        committed.append(min(follows[last] + 1, len(rest)))
        at += committed[-1]
    return accepted, offered, committed


class Guesser(Drafter):
    """Random trees in which, with probability `skill`, some child of a true node is true.

    It recognises prompts and knows one text for each. What it proposes depends on the prompt and on how far the text
    is, not on the rows beside it. A sixth of the nodes is invalid, true ones too.
    """

    def __init__(
        self, texts: dict[tuple[int, ...], list[int]], nodes: int = 8, skill: float = 0.8, vocabulary: int = 256
    ):
        super().__init__()
        self.texts, self.nodes, self.skill, self.vocabulary = texts, nodes, skill, vocabulary
        self.proposed: dict[tuple[int, ...], list[Proposal]] = {prompt: [] for prompt in texts}

    def begin(self, rows: int, capacity: int) -> list[tuple[tuple[int, ...], int]]:
        """For every row its prompt, and how many tokens of the text the target has read."""
        return [((), 0)] * rows

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """One random tree a row."""
        trees = []
        for row, length in enumerate(committed.length.tolist()):
            new = tuple(committed.tokens[row, :length].tolist())
            state[row] = (new, 0) if new in self.texts else (state[row][0], state[row][1] + length)
            prompt, read = state[row]
            trees.append(self.guess(prompt, read, int(committed.bonus[row])))
            self.proposed[prompt].append(trees[-1])
        tokens, parents, valid = zip(*trees, strict=True)
        return TokenTree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))

    def guess(self, prompt: tuple[int, ...], read: int, root: int) -> Proposal:
        """A tree of tokens that might follow token number `read` of the text after `prompt`."""
        chance = random.Random(f"{prompt} {read}")
        text = self.texts[prompt]
        tokens, parents, valid, depth, true = [root], [-1], [True], [0], [True]
        for node in range(1, self.nodes):
            parent = chance.choice([*range(node), *(other for other in range(node) if true[other])])
            at = read + depth[parent] + 1
            good = true[parent] and at < len(text) and chance.random() < self.skill
            tokens.append(text[at] if good else chance.randrange(self.vocabulary))
            parents.append(parent)
            valid.append(chance.random() > 1 / 6)
            depth.append(depth[parent] + 1)
            true.append(good)
        return tokens, parents, valid


class Garbage(Drafter):
    """The same tree of the same tokens, whatever the text."""

    def __init__(self, parents: Sequence[int], vocabulary: int = 256):
        super().__init__()
        self.parents, self.vocabulary = torch.tensor(parents), vocabulary
        self.weight = nn.Parameter(torch.zeros(()))

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """Token 0 below token 1 below token 2 ..., under the root."""
        rows, nodes = len(committed.length), len(self.parents)
        tokens = torch.arange(nodes).expand(rows, nodes) % self.vocabulary
        tokens = torch.cat([committed.bonus[:, None], tokens[:, 1:]], dim=1)
        return TokenTree(tokens, self.parents.expand(rows, nodes), torch.ones(rows, nodes, dtype=torch.bool))


class Tabled(Drafter):
    """A static tree from a table [V, V] of what follows a token: top picks, or drawn one by one without replacement."""

    def __init__(self, table: Tensor, paths: Sequence[Path], drawn: bool):
        super().__init__()
        self.table, self.order = table, table.argsort(dim=-1, descending=True)
        self.paths, self.drawn, self.parents = paths, drawn, parents_of(paths)

    def propose(self, committed: Committed, state: Any, budget: Budget, voice: Voice) -> TokenTree:
        """One tree a row; drawn ones say what they were drawn from."""
        roots = committed.bonus.tolist()
        if self.drawn:
            rows = [self.draw_below(root, draw) for root, draw in zip(roots, voice.draws, strict=True)]
        else:
            rows = [self.pick_below(root) for root in roots]
        tokens = torch.tensor(rows)
        parents = torch.tensor(self.parents).expand_as(tokens)
        return TokenTree(tokens, parents, self.used(tokens), self.table[tokens] if self.drawn else None)

    def pick_below(self, root: int) -> list[int]:
        """The tokens of a tree of first choices below `root`."""
        tokens = [root]
        for path, parent in zip(self.paths, self.parents[1:], strict=True):
            tokens.append(int(self.order[tokens[parent], path[-1]]))
        return tokens

    def draw_below(self, root: int, draw: Draw) -> list[int]:
        """The tokens of a drawn tree below `root`."""
        tokens, left = [root], {0: self.weights(root)}
        for node, parent in enumerate(self.parents[1:], 1):
            tokens.append(draw(left[parent]))
            left[parent][tokens[-1]] = 0.0
            left[node] = self.weights(tokens[-1])
        return tokens

    def weights(self, token: int) -> Tensor:
        """[V] what children of `token` are drawn from."""
        return self.table[token].clone()

    def used(self, tokens: Tensor) -> Tensor:
        """[B, N] which nodes may be accepted."""
        return torch.ones_like(tokens, dtype=torch.bool)


def fewest_rows(lengths: Sequence[int], room: int) -> int:
    """The fewest rows of `room` tokens in which conversations of `lengths` can stand, by trying every way."""
    rows = range(len(lengths))
    return min(
        len(set(ways))
        for ways in itertools.product(rows, repeat=len(lengths))
        if all(sum(length for length, way in zip(lengths, ways, strict=True) if way == row) <= room for row in rows)
    )


def loss_of_guess(name: str, target: Tensor, draft: Tensor, label: int | None) -> Tensor:
    """One loss of one guess, from probabilities: the target's over all tokens, the draft's 0 where it has none."""
    alpha = torch.minimum(target, draft).sum()
    drafted = draft > 0
    said, guessed = target[drafted], draft[drafted]
    kl = (said * (said / said.sum() / guessed).log()).sum()
    if name == "ce":
        return draft.new_zeros(()) if label is None else -draft[label].log()
    if name == "lk_hybrid":
        weight = math.exp(-3 * alpha.item())
        return weight * kl + (1 - weight) * (1 - alpha)
    return {
        "kl": kl,
        "reverse_kl": (guessed * (guessed / said).log()).sum(),
        "tv": (target - draft).abs().sum() / 2,
        "lk_alpha": -alpha.log(),
    }[name]


def loss_of_chains(
    mix: dict[str, float],
    decay: float | str,
    chains: Sequence[Sequence[tuple[Tensor, Tensor, int | None]]],
    depths: int,
) -> Tensor:
    """A mix of losses over chains of guesses (target's and draft's probabilities over all tokens, label), guess by guess."""
    total = torch.zeros((), dtype=chains[0][0][0].dtype)
    for chain in chains:
        smooth = [0.5 if label is None else 0.5 * draft[label].item() + 0.5 for _, draft, label in chain]
        reached = list(itertools.accumulate(smooth, lambda a, b: a * b))
        survived = torch.ones_like(total)
        for depth, (target, draft, label) in enumerate(chain):
            weight = sum(reached[depth:]) if decay == "dpace" else decay**depth
            survived = survived * torch.minimum(target, draft).sum()
            for name, share in mix.items():
                if name == "acceptance":
                    total = total + share * (1 - survived) / depths
                else:
                    total = total + share * weight * loss_of_guess(name, target, draft, label)
    return total


def attention_by_query(
    queries: Tensor, pairs: tuple[Tensor, Tensor], at: Tensor, document: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """[B, H, Q, C] each query's softmax over the keys up to its position in its document and its own in `own`, one by one."""
    rows, heads, count, width = queries.shape
    shared = heads // pairs[0].shape[1]
    found = []
    for row, head, query in itertools.product(range(rows), range(heads), range(count)):
        place, group = int(at[row, query]), head // shared
        seen = [there for there in range(place + 1) if document[row, there] == document[row, place]]
        keys, values = (
            torch.stack([one[row, group, there] for there in seen] + [pair[number][row, group, query] for pair in own])
            for number, one in enumerate(pairs)
        )
        found.append((keys @ queries[row, head, query] * width**-0.5).softmax(0) @ values)
    return torch.stack(found).view(rows, heads, count, width)


def joint_by_hand(
    ids: list[int],
    said: list[bool],
    before: Tensor | None,
    logits: Tensor,
    heads: Sequence[Tensor],
    weight: float,
    decay: float,
) -> Tensor:
    """[] the loss of one conversation, token by token: the target's own, and that of head k for the token k further.

    `logits` [T, V] of the target, `before` [T, V] those it had when its adapter was off, or None: the text teaches. `heads` K times [T, V].
    """
    total = logits.new_zeros(())
    for t in range(len(ids) - 1):
        if not said[t + 1]:
            continue
        now = logits[t].log_softmax(-1)
        if before is None:
            total = total - now[ids[t + 1]]
        else:
            old = before[t].log_softmax(-1)
            total = total + (old.exp() * (old - now)).sum()
        for k, guess in enumerate(heads, start=1):
            if t + 1 + k < len(ids) and all(said[t + 1 : t + 2 + k]):
                total = total - weight * decay ** (k - 1) * guess[t].log_softmax(-1)[ids[t + 1 + k]]
    return total
