// A click on a picture of a page opens it as large as the window; a click or Escape closes it.
document.addEventListener("DOMContentLoaded", () => {
  const dialog = document.createElement("dialog");
  dialog.className = "zoom";
  const large = document.createElement("img");
  dialog.append(large);
  dialog.addEventListener("click", () => dialog.close());
  document.body.append(dialog);
  for (const picture of document.querySelectorAll("article img")) {
    picture.addEventListener("click", (event) => {
      event.preventDefault();
      large.src = picture.src;
      large.alt = picture.alt;
      dialog.showModal();
    });
  }
});
