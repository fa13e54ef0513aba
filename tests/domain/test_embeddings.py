"""The built-in embedder."""

import asyncio
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.llm.builtin_embedder import MAX_CHARACTERS, BuiltinEmbedder, stem
from bottega.memory.text.embeddings import Embedder, Vectors

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=60)  # lone surrogates as well


def embed(*texts: str) -> Vectors:
    embedder: Embedder = BuiltinEmbedder()
    return asyncio.run(embedder.embed(texts))


def cosine(one: str, other: str) -> float:
    first, second = embed(one, other)
    return float(first @ second)


class TestVectors:
    def test_model_and_dimension_are_stated(self) -> None:
        embedder: Embedder = BuiltinEmbedder()
        assert (embedder.name, embedder.dimension) == ("builtin-1", 768)
        vectors = embed("one", "two", "three")
        assert vectors.shape == (3, embedder.dimension)
        assert vectors.dtype == np.float32

    def test_no_texts_give_no_rows(self) -> None:
        assert embed().shape == (0, 768)

    @settings(deadline=None)
    @given(st.lists(ANY_TEXT, min_size=1, max_size=9))
    def test_vector_of_any_text_has_length_1(self, texts: list[str]) -> None:
        assert np.abs(np.linalg.norm(embed(*texts), axis=1) - 1).max() < 1e-6

    @pytest.mark.deep
    @settings(deadline=None)
    @given(st.lists(ANY_TEXT, min_size=1, max_size=9))
    def test_other_texts_in_the_batch_change_no_bit(self, texts: list[str]) -> None:
        backwards = embed(*reversed(texts))[::-1]
        for text, vector in zip(texts, backwards, strict=True):
            assert vector.tobytes() == embed(text)[0].tobytes()

    def test_vectors_are_the_same_in_every_process_and_on_every_machine(self) -> None:
        """Rename the embedder if these values must change: stored vectors are of the old kind."""
        [vector] = embed(
            "La migrazione del DATABASE è fallita: migrazione nº 42, 数据库 at startup!"
        )
        digest = sha256(vector.astype("<f4").tobytes()).hexdigest()
        assert digest[:16] == "5448f00a6c52a07a"

    # The last has two stop words that share a place, with opposite signs.
    @pytest.mark.parametrize("text", ["", " \n", "?!", "\U0001f389", "\ud800", "her delle"])
    def test_text_without_words_is_a_fixed_vector_near_nothing(self, text: str) -> None:
        blank, other = embed(text, "a real text")
        assert blank.tobytes() == embed("")[0].tobytes()
        assert abs(float(blank @ other)) < 0.2

    def test_text_beyond_the_limit_does_not_count(self) -> None:
        text = "word " * (MAX_CHARACTERS // 5) + "   "
        assert cosine(text, text[:MAX_CHARACTERS] + " beyond") == pytest.approx(1)


class TestNormalisation:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("Design the API", "design, the... api!"),
            ("perché la città è così", "PERCHE la citta e cosi"),
            ("e\u0301tude", "\u00e9tude"),
            ("\uff46\uff55\uff4c\uff4c width", "full width"),
            ("Stra\u00dfe", "STRASSE"),
            ("snake_case", "snake case"),
        ],
    )
    def test_texts_that_differ_in_spelling_only_are_equal(self, one: str, other: str) -> None:
        assert cosine(one, other) == pytest.approx(1)

    @pytest.mark.parametrize(
        ("forms", "common"),
        [
            (("service", "services"), "servic"),
            (("test", "tests", "testing", "tested"), "test"),
            (("utente", "utenti"), "utent"),
            (("servizio", "servizi"), "serviz"),
            (("traduzione", "traduzioni"), "tradu"),
            (("api", "it"), None),
        ],
    )
    def test_endings_are_cut_but_never_a_whole_word(
        self, forms: tuple[str, ...], common: str | None
    ) -> None:
        assert [stem(form) for form in forms] == [common or form for form in forms]


TRIPLES = [
    (
        "How do I reset my password?",
        "Steps for resetting a forgotten password",
        "Opening hours of the library",
    ),
    (
        "The database migration failed at startup",
        "Startup aborts since migrating the database raises an error",
        "The bird that sings at night failed to come",
    ),
    (
        "Write unit tests for the payment module",
        "Testing payments: unit test cases for refunds and charges",
        "Write a letter for the quick dinner",
    ),
    (
        "The server is running out of memory",
        "Memory usage of the server grows until it is killed",
        "Tickets for the concert are running out",
    ),
    (
        "Summarise customer complaints about delivery",
        "Customers complained that deliveries were late",
        "The algorithm sorts numbers quickly",
    ),
    (
        "How much does shipping cost?",
        "Shipping costs depend on the weight",
        "How much does she know of the Roman empire?",
    ),
    (
        "Come posso reimpostare la password?",
        "Istruzioni per reimpostare una password dimenticata",
        "Come posso trovare gli orari della biblioteca?",
    ),
    (
        "La migrazione del database non riesce all'avvio",
        "Errore durante le migrazioni dei database",
        "Un uccello non canta nel giardino all'alba",
    ),
    (
        "Elenca i requisiti della pagina di accesso",
        "Requisito: l'utente accede con posta e password",
        "Il gatto dorme sul divano della nonna",
    ),
    (
        "Scrivi i test del modulo pagamenti",
        "Prove unitarie del pagamento: rimborsi e addebiti testati",
        "Ricette per una cena veloce",
    ),
    (
        "Traduci il manuale utente in tedesco",
        "Le traduzioni tedesche dei manuali per gli utenti",
        "La borsa ha chiuso in calo lunedì",
    ),
    (
        "Riassumi i reclami dei clienti sulla consegna",
        "Un cliente reclama per consegne in ritardo",
        "L'algoritmo ordina i numeri rapidamente",
    ),
]


@pytest.mark.parametrize(("text", "near", "far"), TRIPLES, ids=[each[0] for each in TRIPLES])
def test_text_on_the_same_subject_is_nearer_than_another(text: str, near: str, far: str) -> None:
    assert cosine(text, near) > cosine(text, far) + 0.1


async def test_long_batch_lets_other_tasks_run() -> None:
    turns: list[int] = []
    loop = asyncio.get_running_loop()
    loop.call_soon(turns.append, 1)
    await BuiltinEmbedder().embed(["text"] * 100)
    assert turns
