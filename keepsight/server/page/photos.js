// Photos as they are sent: those of a phone have more pixels than a model looks at, and every turn
// sends them again, so large ones are made smaller here, upright, and the page says so.

const OFF = "keepsight-photos";
const LARGEST = 4_000_000; // pixels: a page of text at 200 dots per inch
const QUALITY = 0.92;

/** Whether large photos are made smaller. */
export const isShrinking = () => localStorage.getItem(OFF) !== "whole";

export function setShrinking(on) {
  if (on) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "whole");
}

/** Whether a file is a phone's HEIC photo, which few browsers show. */
export const isHeic = (file) => /^image\/hei[cf]/.test(file.type) || /\.hei[cf]$/i.test(file.name);

/** What to send for a file, and a note where that is not the file itself: { file, note }. */
export async function fitted(file) {
  const heic = isHeic(file);
  if (/^image\/(gif|svg)/.test(file.type)) return { file, note: "" };
  let picture;
  try {
    picture = await createImageBitmap(file); // upright, as its EXIF says
  } catch {
    return { file, note: "" }; // the server says whether it can read it
  }
  try {
    const { width, height } = picture;
    const scale = Math.min(1, Math.sqrt(LARGEST / (width * height)));
    if (scale === 1 || !isShrinking()) return heic ? { file: await drawn(picture, width, height, file), note: "sent as JPEG" } : { file, note: "" };
    const small = [width, height].map((side) => Math.max(1, Math.floor(side * scale)));
    const sent = await drawn(picture, ...small, file);
    return { file: sent, note: `shrunk from ${width} × ${height} to ${small.join(" × ")}` };
  } catch {
    return { file, note: "" }; // no room for so large a drawing
  } finally {
    picture.close();
  }
}

/** A picture drawn anew: screenshots stay without loss, photos are JPEG. */
async function drawn(picture, width, height, { type, name }) {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(picture, 0, 0, width, height);
  const as = type === "image/png" ? type : "image/jpeg";
  const blob = await new Promise((done) => canvas.toBlob(done, as, QUALITY));
  if (!blob) throw new Error("not drawn");
  return new File([blob], name, { type: as });
}
