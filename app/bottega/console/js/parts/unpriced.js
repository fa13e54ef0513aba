/** The way to prices of models that are not known. */
import { html } from "../html.js";
import { Link } from "./basics.js";

/** `models`: names of those without a known price. */
export const Unpriced = ({ models }) => models.map((model) => html`<${Link} key=${model} needs="read" class="small"
  path=${["operations", "providers"]} query=${{ model }}>Set the price of ${model}<//> `);
