// Typesets what pymdownx.arithmatex has marked, on each page that Material shows.
document$.subscribe(() => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const formula = element.textContent.trim().slice(2, -2); // without \( \) or \[ \]
    katex.render(formula, element, { displayMode: element.tagName === "DIV", throwOnError: false });
  }
});
