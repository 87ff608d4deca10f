// The fat binary of kernels.cu between two symbols, and whether its kernels check ranges.
        .section .rodata
        .balign 64
        .globl  epd_cuda_image
        .hidden epd_cuda_image
        .globl  epd_cuda_image_end
        .hidden epd_cuda_image_end
epd_cuda_image:
        .incbin EPD_CUDA_IMAGE
epd_cuda_image_end:
        .globl  epd_cuda_image_checks
        .hidden epd_cuda_image_checks
epd_cuda_image_checks:
#ifdef EPD_KERNEL_ASSERTS
        .byte 1
#else
        .byte 0
#endif
        .section .note.GNU-stack, "", %progbits
