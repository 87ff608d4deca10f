// The fat binary of kernels.cu, between two names.
        .section .rodata
        .balign 64
        .globl  epd_cuda_image
        .hidden epd_cuda_image
        .globl  epd_cuda_image_end
        .hidden epd_cuda_image_end
epd_cuda_image:
        .incbin EPD_CUDA_IMAGE
epd_cuda_image_end:
        .section .note.GNU-stack, "", %progbits
