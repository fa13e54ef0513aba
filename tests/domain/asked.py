"""Two hundred tasks in six languages, in forms that rules mistake for goals and constraints."""

from collections.abc import Iterator
from typing import NamedTuple


class Words(NamedTuple):
    """Phrases of one language.

    Attributes:
        goal, limits, criteria: labels.
        do, also: two demands.
        must, until: sentences with a limit and with an end.
        translate: asks for a translation of what follows.
        mail: headers of a forwarded mail.
        said: begins a quotation.
    """

    goal: str
    limits: str
    criteria: str
    do: str
    also: str
    must: str
    until: str
    translate: str
    mail: str
    said: str


LANGUAGES = {
    "en": Words(
        "Goal",
        "Constraints",
        "Success criteria",
        "Add JWT to the login.",
        "Write a test for it.",
        "You must never store passwords.",
        "Work until all tests pass.",
        "Translate into French:",
        "From: Ann\nSubject: Fwd: plan",
        "My boss wrote:",
    ),
    "it": Words(
        "Obiettivo",
        "Vincoli",
        "Criteri di successo",
        "Aggiungi il JWT al login.",
        "Scrivi un test.",
        "Non devi mai salvare le password.",
        "Lavora finché tutti i test passano.",
        "Traduci in francese:",
        "Da: Anna\nOggetto: I: piano",
        "Il mio capo ha scritto:",
    ),
    "es": Words(
        "Objetivo",
        "Restricciones",
        "Criterios de éxito",
        "Añade JWT al acceso.",
        "Escribe una prueba.",
        "Nunca debe guardar contraseñas.",
        "Trabaja hasta que pasen las pruebas.",
        "Traduce al francés:",
        "De: Ana\nAsunto: RV: plan",
        "Mi jefa escribió:",
    ),
    "fr": Words(
        "Objectif",
        "Contraintes",
        "Critères de réussite",
        "Ajoute JWT à la connexion.",
        "Écris un test.",
        "On ne doit jamais garder les mots de passe.",
        "Travaille jusqu'à ce que les tests passent.",
        "Traduis en anglais :",
        "De : Anne\nObjet : TR : plan",
        "Mon chef a écrit :",
    ),
    "de": Words(
        "Ziel",
        "Einschränkungen",
        "Erfolgskriterien",
        "Ergänze JWT bei der Anmeldung.",
        "Schreibe einen Test.",
        "Es muss ohne gespeicherte Passwörter gehen.",
        "Arbeite, bis dass alle Tests grün sind.",
        "Übersetze ins Englische:",
        "Von: Anna\nBetreff: WG: Plan",
        "Mein Chef schrieb:",
    ),
    "pt": Words(
        "Objetivo",
        "Restrições",
        "Critérios de sucesso",
        "Adicione JWT ao login.",
        "Escreva um teste.",
        "Nunca deve guardar senhas.",
        "Trabalhe até que todos os testes passem.",
        "Traduza para o inglês:",
        "De: Ana\nAssunto: Enc: plano",
        "O meu chefe escreveu:",
    ),
}


def _forms(w: Words) -> Iterator[str]:
    labels = f"{w.goal}: {w.do}\n{w.limits}: {w.must}\n{w.criteria}: {w.until}"
    listed = f"{w.goal}:\n- {w.do}\n- {w.also}\n{w.limits}:\n* {w.must}"
    yield w.do
    yield w.must
    yield w.until
    yield f"{w.do} {w.also}"
    yield f"{w.do} {w.must} {w.until}"
    yield f"1. {w.do}\n2. {w.also}\n3) {w.must}"
    yield f"- {w.do}\n- {w.also}\n- {w.until}"
    yield labels
    yield listed
    yield f"{w.goal.upper()} - {w.do}; {w.must}"
    yield f"**{w.goal}**: {w.do}\n## {w.limits}\n{w.must}"
    yield f"{w.translate}\n\n{labels}"
    yield f"{w.translate} «{w.do} {w.must}»"
    yield f"{w.translate}\n{listed}\n\n{w.also}"
    yield f'{w.translate} "{w.goal}: {w.do}"'
    yield "\n".join(f"> {line}" for line in labels.splitlines())
    yield f"{w.said}\n> {w.do}\n>> {w.must}\n\n{w.also}"
    yield f"{w.said} “{w.do} {w.must}” {w.also}"
    yield f"```\n{labels}\n```\n{w.also}"
    yield f"```yaml\n{w.goal}: x\n{w.limits}: [a, b]\n```\n{w.do}"
    yield f"~~~\n{listed}\n~~~"
    yield f"{w.also}\n\n    {w.goal}: {w.do}\n    # {w.must}\n    return 1"
    yield f"{w.also}\n```\nassert must_not(x)  # {w.until}\n{w.goal}: y"
    yield f"{w.mail}\n\n{w.do} {w.must}\n\n{w.also}"
    yield f"{w.also}\n\n-----\n{w.mail}\n\n{labels}"
    yield f"{w.mail}\n> {w.mail}\n>> {labels}\n-- \nAnn"
    yield f"{w.do}\r\n{w.limits}: {w.must}\r\n"
    yield f"  {w.goal}: {w.do}\n\t{w.limits}: {w.must}"
    yield f"{w.do}\u2028{w.goal}: {w.must}"
    yield f"| {w.goal} | {w.limits} |\n|---|---|\n| {w.do} | {w.must} |"
    yield f"<goal>{w.do}</goal><constraints>{w.must}</constraints>"
    yield f'{{"goals": ["{w.do}"], "constraints": ["{w.must}"]}}'
    yield f"{w.goal}:"
    yield f"{w.said} {w.goal}: {w.do} " * 20
    yield f"{w.do} " + "x " * 400 + w.must


TASKS = [(language, task) for language, words in LANGUAGES.items() for task in _forms(words)]
