// A photo from a camera, a file, the clipboard or a drop.

async function openCamera(dialog, video) {
  if (!navigator.mediaDevices) {
    notice('This browser gives no camera to this page: it needs localhost or https.');
    return;
  }
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: true });
  } catch (error) {
    notice(`There is no camera: ${error.message}`);
    return;
  }
  dialog.showModal();
}

function closeCamera(dialog, video) {
  if (video.srcObject) video.srcObject.getTracks().forEach((track) => track.stop());
  video.srcObject = null;
  dialog.close();
}

function takePhoto(video) {
  const canvas = make('canvas', { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext('2d').drawImage(video, 0, 0);
  return new Promise((done) => canvas.toBlob(done, 'image/jpeg', 0.92));
}

function listenForPhotos(take) {
  const get = (id) => document.getElementById(id);
  const [dialog, video, drop, file] = ['camera', 'video', 'drop', 'file'].map(get);
  file.addEventListener('change', () => { if (file.files[0]) take(file.files[0], file.files[0].name); file.value = ''; });
  get('shoot').addEventListener('click', () => openCamera(dialog, video));
  get('close').addEventListener('click', () => closeCamera(dialog, video));
  dialog.addEventListener('cancel', () => closeCamera(dialog, video));
  get('snap').addEventListener('click', async () => {
    const photo = await takePhoto(video);
    closeCamera(dialog, video);
    take(photo, 'camera.jpg');
  });
  document.addEventListener('paste', (event) => {
    const pasted = Array.from(event.clipboardData.files).find((each) => each.type.startsWith('image/'));
    if (pasted) take(pasted, pasted.name || 'pasted.png');
    else notice('There is no image in the clipboard.');
  });
  document.addEventListener('dragover', (event) => { event.preventDefault(); drop.classList.add('over'); });
  document.addEventListener('dragleave', () => drop.classList.remove('over'));
  document.addEventListener('drop', (event) => {
    event.preventDefault();
    drop.classList.remove('over');
    const [dropped] = event.dataTransfer.files;
    if (dropped) take(dropped, dropped.name);
    else notice('Drop an image file, not a link: this page loads nothing from elsewhere.');
  });
}
