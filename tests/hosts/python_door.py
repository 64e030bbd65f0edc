"""The Python door: ``MyModel(model)`` is the model that ms-swift's pipeline gives to its trainer."""
try:
    from swift.pipelines.train.sft import SwiftSft
except ImportError:  # ms-swift 3
    from swift.llm.train.sft import SwiftSft

from swift_speedup import MyModel


class Pipeline(SwiftSft):
    @classmethod
    def prepare_model(cls, *args, **kwargs):
        return MyModel(super().prepare_model(*args, **kwargs), ram_gib=1)


if __name__ == '__main__':
    Pipeline(None).main()
