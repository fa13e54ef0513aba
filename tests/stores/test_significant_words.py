"""Search by informative words in any language: uninformative words find nothing."""

import pytest

from bottega.db.pool import Database, acting_as
from bottega.db.tables import DEFAULT_TENANT
from bottega.memory.episodes.scope import EVERYTHING, Reach, Scope
from bottega.memory.episodes.search import candidates, refresh_common
from bottega.memory.text.content import content_words
from tests.memories import day, make_episode, store_episodes

# Five unrelated tasks, a question about none of them that shares their small words, and a question
# about the first.
ITALIAN = (
    (
        "Prepara la relazione della riunione di lunedì per la direzione.",
        "Controlla la temperatura della cella frigorifera e la pressione dell'olio.",
        "Traduci la lettera della banca per il cliente di Torino.",
        "Ordina la carta della stampante con il catalogo del fornitore.",
        "Verifica la fattura della ditta delle pulizie e paga la differenza.",
    ),
    "Qual è la capitale della Mongolia e con chi confina?",
    "La relazione della direzione è pronta?",
)
GERMAN = (
    (
        "Bereite den Bericht über die Sitzung am Montag für die Leitung vor.",
        "Prüfe die Temperatur in der Kühlkammer und den Druck des Öls.",
        "Übersetze den Brief von der Bank für den Kunden aus Köln.",
        "Bestelle das Papier für den Drucker mit dem Katalog des Händlers.",
        "Zahle die Rechnung der Reinigung, wenn sie mit dem Vertrag übereinstimmt.",
    ),
    "Wie heißt die Hauptstadt der Mongolei, und mit wem hat sie eine Grenze?",
    "Ist der BERICHT für die Leitung fertig?",
)
ENGLISH = (
    (
        "Prepare the report of the meeting on Monday for the board.",
        "Check the temperature of the cold store and the pressure of the oil.",
        "Translate the letter of the bank for the client in Leeds.",
        "Order the paper of the printer with the catalogue of the dealer.",
        "Pay the invoice of the cleaners if it is the same as in the contract.",
    ),
    "What is the capital of Mongolia, and who are the neighbours of it?",
    "Is the report for the board ready?",
)
CHINESE = (
    (
        "请准备星期一会议的报告",
        "请检查冷藏室的温度和机油的压力",
        "请翻译银行给客户的信",
        "请按照供应商的目录订购打印机的纸",
        "请支付清洁公司的发票",
    ),
    "蒙古国与哪些邻邦接壤",
    "会议的报告准备好了吗",
)
LANGUAGES = {"Italian": ITALIAN, "German": GERMAN, "English": ENGLISH, "Chinese": CHINESE}


async def find_tasks(database: Database, query: str, *, least: int = 0) -> set[str]:
    """Return the tasks that share content words with a query; those that count at least so much."""
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        words = content_words(query)
        found = await candidates(
            connection, EVERYTHING, words, None, embedder=None, aged_before=day(-99)
        )
        ids = [
            each.episode_id
            for each in found
            if words.some(each.words) and words.count(each.words) >= least
        ]
        rows = await connection.fetch("SELECT summary FROM episodes WHERE id = ANY ($1)", ids)
    assert all((each.lexical or 0) > 0 for each in found)
    return {row["summary"] for row in rows}


@pytest.mark.parametrize("language", LANGUAGES)
async def test_no_word_finds_unrelated_tasks(database: Database, language: str) -> None:
    tasks, unrelated, related = LANGUAGES[language]
    await store_episodes(
        database.pool, *(make_episode(task, day(1), answer="") for task in tasks), embedded=False
    )
    assert await find_tasks(database, unrelated) == set()
    (found,) = await find_tasks(database, related)
    assert tasks[0] in found


async def test_a_word_counts_that_is_rare_in_the_tenant(database: Database) -> None:
    """Look within the scope of a user who has only tasks with this word."""
    invoices = [
        make_episode(f"Pay the invoice of Rossi {n}", day(1), user_id="ann") for n in range(20)
    ]
    others = [make_episode(f"chair{n} lamp{n}", day(2), user_id="bo") for n in range(200)]
    await store_episodes(database.pool, *invoices, *others, embedded=False)
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        await refresh_common(connection, DEFAULT_TENANT)
        scope = Scope(Reach.USER, user="ann")
        found = await candidates(
            connection,
            scope,
            content_words("invoice Rossi"),
            None,
            embedder=None,
            aged_before=day(-99),
        )
    assert {each.words for each in found} == {frozenset({0, 1})}


async def test_an_informative_word_finds_even_a_single_episode(database: Database) -> None:
    await store_episodes(
        database.pool, make_episode("I am allergic to peanuts.", day(1)), embedded=False
    )
    assert len(await find_tasks(database, "What am I allergic to?")) == 1
    assert await find_tasks(database, "What am I to do?") == set()


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("È già tutto pagato a Forlì", "PAGATO"),
        ("perché la città è chiusa", "Citta chiusa"),
        ("Größe der Türen", "GRÖSSE DER TÜREN"),
        ("Заказать бумагу для принтера", "БУМАГУ"),
        ("プリンターの用紙を注文する", "用紙の注文"),
        ("ส่งรายงานการประชุม", "รายงาน"),
        ("the file ab猫が好き", "猫が"),
        ("O'Brien's café \\ bar", "obrien's CAFÉ"),
    ],
)
async def test_a_word_is_found_in_any_spelling(database: Database, stored: str, asked: str) -> None:
    await store_episodes(database.pool, make_episode(stored, day(1)), embedded=False)
    assert len(await find_tasks(database, asked)) == 1


@pytest.mark.parametrize("sampled", [False, True])
async def test_rare_words_are_informative_and_common_words_are_not(
    database: Database, sampled: bool
) -> None:
    many = [make_episode(f"invoice zone{n % 7} number{n}", day(1 + n / 1000)) for n in range(300)]
    await store_episodes(database.pool, *many, embedded=False)
    if sampled:
        async with acting_as(database.pool, DEFAULT_TENANT) as connection:
            await refresh_common(connection, DEFAULT_TENANT)
    assert await find_tasks(database, "invoice") == set()
    assert len(await find_tasks(database, "the invoice number250")) == 1
    async with acting_as(database.pool, DEFAULT_TENANT) as connection:
        found = await candidates(
            connection,
            EVERYTHING,
            content_words("invoice"),
            None,
            embedder=None,
            aged_before=day(-99),
        )
        assert len(found) == 20, "a search still finds as many as it is asked for"
        both = await candidates(
            connection,
            EVERYTHING,
            content_words("invoice number7"),
            None,
            embedder=None,
            aged_before=day(-99),
        )
    best = max(both, key=lambda each: each.lexical or 0)
    assert best.words == {1}
    assert sum(bool(each.words) for each in both) == 1


async def test_a_memory_of_one_kind_of_task_knows_that_kind(database: Database) -> None:
    """Check it with words that all of fewer than 200 episodes have."""
    one_kind = [make_episode(f"Export the invoices of customer{n}", day(1 + n)) for n in range(30)]
    await store_episodes(database.pool, *one_kind, embedded=False)
    assert await find_tasks(database, "Export the invoices of customer77", least=2)
    poem = "Write a poem about invoices, rivers and old bridges"
    assert not await find_tasks(database, poem, least=2)


@pytest.mark.parametrize("query", ["", "la della", "!?", "'", "\\", "a'b\\c & | ! ( ) :*", "=x"])
async def test_any_query_is_read_as_plain_words(database: Database, query: str) -> None:
    await store_episodes(database.pool, make_episode("Export the invoices", day(1)), embedded=False)
    assert await find_tasks(database, query) == set()
