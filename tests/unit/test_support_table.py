"""The tables of conventions and families in README.md."""
import support_table
from toys import conventions, native


def test_most_multimodal_model_types_follow_a_convention():
    covered = conventions.of_model_types()  # raises for one that is not classified
    counts = {name: len(some.types) for name, some in covered.items()}
    assert counts[conventions.PACKED] + counts[conventions.BATCH] >= 101
    assert all(some.tested and set(some.tested) <= set(some.types) for name, some in covered.items() if name != conventions.NONE)


def test_readme_has_todays_numbers_and_every_family():
    text = support_table.README.read_text(encoding='utf-8')
    table = text.partition(support_table.BEGIN)[2].partition(support_table.END)[0]
    assert support_table.markdown(support_table.TYPE_COLUMNS, support_table.type_rows()) in table
    assert all(f'| {name} | ' in table for name in native.class_names())


def test_a_row_tells_what_training_kept():
    row = support_table.family_row('llava_next')
    assert row == ('LlavaNextForConditionalGeneration', 'batch first', '`model.multi_modal_projector`', '`test_native[llava_next]`')
