"""For ``swift --external_plugins``: an eval metric for generated answers that needs no further packages."""
from swift.metrics import eval_metrics_map
from swift.metrics.base import EvalMetrics
from swift.utils import Serializer


class Answers(EvalMetrics):
    """How many answers there were, and how many of them hold text."""

    def compute_metrics(self, eval_prediction):
        texts = [Serializer.from_tensor(answer) for answer in eval_prediction.predictions]
        return {'answers': float(len(texts)), 'texts': float(sum(isinstance(text, str) and bool(text.strip()) for text in texts))}


eval_metrics_map['answers'] = Answers
