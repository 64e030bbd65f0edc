"""For ``swift --external_plugins``: a reward that needs no model, for GRPO."""
try:
    from swift.rewards import ORM, orms
except ImportError:  # ms-swift 3
    from swift.plugin import ORM, orms


class Toy(ORM):
    """Other numbers at each step and for each completion, the same in each run."""

    def __call__(self, completions, trainer_state=None, **kwargs):
        return [float((7 * trainer_state.global_step + 3 * place) % 5) for place in range(len(completions))]


orms['toy'] = Toy
